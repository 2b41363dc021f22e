"""Links on a context and a worker of UCX that kvlink has not made.

ucxx and ucx-py are heavy and not part of an ordinary test run; ``scripts/test-ucx`` installs the first and runs these.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

import kvlink as kv
from kvlink.transports.ucx import declarations as ucp
from kvlink.transports.ucx.context import Context
from kvlink.transports.ucx.library import ONE_SIDED, load
from tests.support import inside
from tests.support.ucx import need_ucx

pytestmark = pytest.mark.ucx
DESC = kv.CacheDesc(4, (64, 4096), "uint8")


async def check_links(provider: object, **ucx: Any) -> None:
    """Pull and push between a cluster on `provider` and one on handles of its own, both ways round."""
    theirs = kv.ClusterConfig(transports=("ucx",), ucx=kv.UcxConfig(provider=provider, **ucx))
    ours = kv.ClusterConfig(transports=("ucx",), ucx=kv.UcxConfig(**ucx))
    with anyio.fail_after(30):
        async with (
            kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="2MiB", config=theirs) as first,
            kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="2MiB", config=ours) as second,
        ):
            (await second.link_clusters([kv.ClusterInfo(1, first.address)])).raise_for_status()
            blocks = list(range(64))
            for owner, reader in ((first, second), (second, first)):
                peer = owner.cluster_id
                source = owner.kv_cache_manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(peer))
                target = reader.kv_cache_manager.allocate_blocks_cache(DESC)
                for index, tensor in enumerate(source.tensors):
                    tensor[...] = np.arange(64, dtype=np.uint8)[:, None] + np.uint8(index * 64)
                await reader.kv_cache_manager.pull_blocks(kv.BlocksCacheKey(peer), target, blocks, blocks[::-1])
                for here, there in zip(target.tensors, source.tensors, strict=True):
                    assert np.array_equal(here, there[::-1])
                await reader.kv_cache_manager.push_blocks(kv.BlocksCacheKey(peer), target, blocks, blocks)
                for here, there in zip(target.tensors, source.tensors, strict=True):
                    assert np.array_equal(here, there)
                assert inside.link_to(reader, peer).transport == "ucx"
                owner.kv_cache_manager.deallocate_cache(source)
                reader.kv_cache_manager.deallocate_cache(target)


async def test_handles_of_somebody_else_serve_links_and_stay_theirs() -> None:
    """kvlink moves bytes on a worker that it was handed, leaves it as it was, and can be handed it again."""
    need_ucx()
    if load().version[:2] < ONE_SIDED:
        pytest.skip("this release of UCX imitates get by messages, which the owner of the handles must let progress")
    context = Context.create(kv.UcxConfig(), ucp.THREAD_MODE_MULTI)
    ffi = context.library.ffi
    handles = kv.UcxHandles(
        int(ffi.cast("uintptr_t", context.handle)), int(ffi.cast("uintptr_t", context.worker)), context
    )
    try:
        for _ in range(2):
            await check_links(handles)
            context.library.api.ucp_worker_progress(context.worker)
    finally:
        context.close()


async def test_a_worker_for_one_thread_is_refused() -> None:
    """kvlink's thread may not touch a worker that only one thread may use."""
    need_ucx()
    context = Context.create(kv.UcxConfig())
    ffi = context.library.ffi
    handles = kv.UcxHandles(
        int(ffi.cast("uintptr_t", context.handle)), int(ffi.cast("uintptr_t", context.worker)), context
    )
    try:
        with pytest.raises(kv.FeatureNotEnabledError, match="THREAD_MODE_MULTI"):
            await check_links(handles)
    finally:
        context.close()


@pytest.mark.parametrize("provider", [3, SimpleNamespace(context=1), SimpleNamespace(context="1", worker=2)])
async def test_what_has_no_handles_is_refused(provider: object) -> None:
    """A provider is a known name, or has both handles as integers."""
    with pytest.raises(kv.ParameterError, match="provider"):
        await check_links(provider)


@pytest.mark.parametrize(("name", "package"), [("ucxx", "ucxx"), ("ucx-py", "ucp")])
async def test_a_package_that_is_missing_is_named(name: str, package: str) -> None:
    """Asking for a provider that is not installed says so, and what to do."""
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(kv.FeatureNotEnabledError, match=package):
        await check_links(name)


@pytest.mark.parametrize(("name", "package"), [("ucxx", "ucxx"), ("ucx-py", "ucp")])
def test_a_real_provider_serves_links(name: str, package: str) -> None:
    """Pulls and pushes on the context and the worker of ucxx, or of ucx-py, both ways; in a process of its own."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_ucx_providers", name],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    anyio.run(partial(check_links, sys.argv[1], allow_tcp=True))
