"""The shape of the package, read from its source: layers, cycles, who may know what, length of files.

The tables below are the rules; edit them when a module is added or moved. A module stands in them by its name without
``kvlink.``, and an entry speaks for everything inside it: ``transports`` for ``transports.shm``. ``*`` at the end of an
entry stands for any ending.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = Path(__file__).parents[1] / "kvlink"

# Imports point down or sideways, never up. ``kvlink/__init__`` is above everything, so no module imports from it.
LAYERS: Final[dict[int, tuple[str, ...]]] = {
    1: (
        *("errors", "config", "geometry", "keys", "stats", "report", "wire", "plan", "checks", "loops", "tokens"),
        *("credentials", "handingover"),
        "ucxconfig",
        *("links.state", "transfers.layerconfig", "memory.hostmemory"),
    ),
    2: (
        *("memory", "transports", "acceptor", "listening"),
        *("caches.table", "caches.leases", "caches.store", "caches.kvcache", "caches.arrivals"),
    ),
    3: ("caches",),
    4: ("links", "transfers"),
    5: ("cluster",),
    6: ("cli", "__main__", "doctor", "bench", "benchmarks", "proving", "testing"),
}

# What a plain install brings. sniffio is not among it: anyio no longer depends on it.
DEPENDENCIES: Final = frozenset({"numpy", "anyio", "msgspec"})

# Modules that nothing imports unless their extra is asked for; only they import more than DEPENDENCIES at module level.
OPTIONAL: Final = ("transports.ucx*", "transports._ucp*")

# Who may know UCX, as a Python package or as a shared library, and who may make a memfd.
UCX_PACKAGES: Final = frozenset({"ucp", "ucxx", "libucx", "libucxx", "cffi"})
LIBRARY_OPENERS: Final = frozenset({"CDLL", "PyDLL", "LoadLibrary", "dlopen", "find_library"})
UCX_MODULES: Final = ("transports.ucx*", "transports._ucp*")
MEMFD_MODULES: Final = ("transports.shm*", "memory.pool")

MAX_LINES: Final = 450  # the aim is 400


@dataclass(frozen=True)
class Import:
    """One import: the module that is named, its line, and whether it happens when the importing module is loaded."""

    target: str
    line: int
    at_load: bool


@dataclass(frozen=True)
class Module:
    """One source file. ``name`` is relative to the package; the package's own ``__init__`` is the empty string."""

    name: str
    path: Path
    text: str
    tree: ast.Module


def read_package(root: Path) -> dict[str, Module]:
    """Parse every module below `root`, by name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, text, ast.parse(text, str(path)))
    return modules


def is_listed(name: str, entries: tuple[str, ...]) -> bool:
    """Whether an entry names the module or one of the packages that it lies in."""
    parts = name.split(".")
    homes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(home, entry) for entry in entries for home in homes)


def layer_of(name: str) -> int | None:
    """The layer of a module; None when the table does not know it."""
    if not name:
        return max(LAYERS) + 1
    return next((layer for layer, entries in LAYERS.items() if is_listed(name, entries)), None)


def imports_of(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    """Yield every import of the module, wherever it stands, as absolute names (``kvlink.plan``, ``numpy.lib``).

    ``from x import y`` names ``x.y`` where that is a module of the package, else ``x``. Loading by a name in a string,
    as ``importlib.import_module("x")`` does, counts too.
    """
    home = ["kvlink", *filter(None, module.name.split("."))]
    if module.path.name != "__init__.py":
        home.pop()

    def absolute(name: str, dots: int) -> str:
        return ".".join([*home[: len(home) - dots + 1], *filter(None, [name])]) if dots else name

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_load)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node.module or "", node.level)
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                is_module = inner.startswith("kvlink.") and inner.removeprefix("kvlink.") in modules
                yield Import(inner if is_module else origin, node.lineno, at_load)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            for name in strings(node.args[:1]):
                dots = len(name) - len(name.lstrip("."))
                yield Import(absolute(name[dots:], dots), node.lineno, at_load)
        if isinstance(node, ast.If) and is_for_types(node.test):
            branches: list[tuple[list[ast.stmt], bool]] = [(node.body, False), (node.orelse, at_load)]
            for body, is_loaded in branches:
                for child in body:
                    yield from visit(child, is_loaded)
            return
        inside = at_load and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for below in ast.iter_child_nodes(node):
            yield from visit(below, inside)

    yield from visit(module.tree, True)


def is_for_types(test: ast.expr) -> bool:
    """Whether a condition is ``TYPE_CHECKING``, however it was imported, and nothing more."""
    return isinstance(test, (ast.Name, ast.Attribute)) and ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"


def called(call: ast.Call) -> str:
    """The last name of what is called: ``dlopen`` for ``ffi.dlopen(...)``."""
    return ast.unparse(call.func).rpartition(".")[2]


def strings(nodes: list[ast.expr]) -> list[str]:
    """The plain strings among some expressions."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def top(target: str) -> str:
    """The outermost package of a name."""
    return target.partition(".")[0]


def inner_name(target: str) -> str | None:
    """The name relative to the package (the empty string for the package itself); None for what lies outside."""
    head, _, rest = target.partition(".")
    return rest if head == "kvlink" else None


def upward_imports(modules: dict[str, Module]) -> list[str]:
    """Every module has a layer and imports nothing above it, for types and inside functions either."""
    faults = []
    for name, module in modules.items():
        layer = layer_of(name)
        if layer is None:
            faults.append(f"{module.path}: kvlink.{name} is not in LAYERS; give it a layer")
            continue
        for found in imports_of(module, modules):
            target = inner_name(found.target)
            above = layer_of(target) if target is not None else 0
            if above is not None and above > layer:
                faults.append(f"{module.path}:{found.line}: layer {layer} imports {found.target} of layer {above}")
    return list(dict.fromkeys(faults))


def load_cycles(modules: dict[str, Module]) -> list[str]:
    """No module needs itself to be loaded first; imports for types or inside functions do not load anything."""
    needs: dict[str, set[str]] = {}
    for name, module in modules.items():
        targets = {inner_name(found.target) for found in imports_of(module, modules) if found.at_load}
        needs[name] = {target for target in targets if target in modules}
    faults: list[str] = []
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            cycle = [*trail[trail.index(name) :], name]
            faults.append("imported in a circle: " + " -> ".join(f"kvlink.{step}".rstrip(".") for step in cycle))
        elif name not in done:
            for target in sorted(needs[name]):
                walk(target, [*trail, name])
            done.add(name)

    for name in modules:
        walk(name, [])
    return faults


def undeclared_imports(modules: dict[str, Module]) -> list[str]:
    """Loading the package loads the standard library and its declared dependencies, nothing else."""
    known = {"kvlink", *DEPENDENCIES, *sys.stdlib_module_names}
    return [
        f"{module.path}:{found.line}: {found.target} is no dependency; import it where it is used, or list OPTIONAL"
        for name, module in modules.items()
        for found in imports_of(module, modules)
        if found.at_load and top(found.target) not in known and not is_listed(name, OPTIONAL)
    ]


def ucx_outside(modules: dict[str, Module]) -> list[str]:
    """Only the UCX transport imports UCX's packages or opens its libraries."""
    faults = []
    for name, module in modules.items():
        if is_listed(name, UCX_MODULES):
            continue
        for found in imports_of(module, modules):
            if top(found.target) in UCX_PACKAGES:
                faults.append(f"{module.path}:{found.line}: imports {found.target}; only {UCX_MODULES} know UCX")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and called(node) in LIBRARY_OPENERS:
                opened = " ".join(strings(node.args))
                if any(word in opened for word in ("ucp", "ucs", "uct", "ucx")):
                    faults.append(f"{module.path}:{node.lineno}: opens {opened}; only {UCX_MODULES} know UCX")
    return faults


def memfd_outside(modules: dict[str, Module]) -> list[str]:
    """Only the shared-memory transport and the pool make a memfd."""
    return [
        f"{module.path}:{node.lineno}: memfd_create; only {MEMFD_MODULES} make one"
        for name, module in modules.items()
        if not is_listed(name, MEMFD_MODULES)
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and node.attr == "memfd_create")
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "memfd_create" for alias in node.names))
    ]


def long_files(modules: dict[str, Module]) -> list[str]:
    """A file can be read in one sitting."""
    counts = {module.path: len(module.text.splitlines()) for module in modules.values()}
    return [f"{path}: {count} lines, {MAX_LINES} at most" for path, count in counts.items() if count > MAX_LINES]


Rule = Callable[[dict[str, Module]], list[str]]
RULES: Final[tuple[Rule, ...]] = (
    upward_imports,
    load_cycles,
    undeclared_imports,
    ucx_outside,
    memfd_outside,
    long_files,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Rule) -> None:
    """The package as it stands keeps each rule."""
    modules = read_package(PACKAGE)
    assert "" in sorted(modules), f"no package at {PACKAGE}"
    faults = rule(modules)
    assert not faults, "\n".join(faults)


def test_loading_kvlink_loads_no_extra() -> None:
    """``import kvlink`` in a fresh process leaves every optional package unloaded."""
    extras = {*UCX_PACKAGES, "uvloop", "trio", "ml_dtypes", "prometheus_client", "rich", "matplotlib", "gguf", "torch"}
    probe = f"import sys, kvlink; print(*sorted({extras!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


SOUND: Final = {
    "__init__.py": "from kvlink.cluster import Cluster\nfrom . import errors\n__all__ = ['Cluster', 'errors']\n",
    "errors.py": "import enum\n",
    "keys.py": "from __future__ import annotations\nfrom .errors import KVLinkError\n",
    "memory/pool.py": "import os\nimport numpy as np\nfd = os.memfd_create('pool')\n",
    "transports/__init__.py": "from .shm import Shm\ndef ucx():\n    from . import ucx\n    return ucx\n",
    "transports/base.py": "from kvlink import errors\nfrom ..keys import Key\n",
    "transports/shm.py": "from os import memfd_create\nfrom .base import Transport\n",
    "transports/ucx/__init__.py": "from . import _lib\nfrom ..base import Transport\n",
    "transports/ucx/_lib.py": "import cffi\ncffi.FFI().dlopen('libucp.so.0')\n",
    "cluster.py": "import anyio.abc\nfrom . import transports\ndef loop():\n    import uvloop\n    return uvloop\n",
    "cli.py": "import os.path\nfrom .cluster import Cluster\n",
}

CYCLE: Final = "kvlink.errors -> kvlink.keys -> kvlink.errors"
FOR_TYPES: Final = "import typing\nif typing.TYPE_CHECKING:\n    "

# What is wrong: the rule that finds it, the one file that is changed or added, its text, a part of what the rule says.
BROKEN: Final[dict[str, tuple[Rule, str, str, str]]] = {
    "up": (upward_imports, "keys.py", "import kvlink.cluster", "keys.py:1: layer 1 imports kvlink.cluster of layer 5"),
    "up one dot": (
        upward_imports,
        "keys.py",
        "\nfrom .memory import pool",
        "keys.py:2: layer 1 imports kvlink.memory.pool of layer 2",
    ),
    "up two dots": (
        upward_imports,
        "transports/shm.py",
        "from ..cluster import Cluster",
        "layer 2 imports kvlink.cluster",
    ),
    "up for types": (
        upward_imports,
        "memory/pool.py",
        FOR_TYPES + "from ..cluster import X",
        "pool.py:3: layer 2 imports kvlink.cl",
    ),
    "up in a function": (
        upward_imports,
        "errors.py",
        "def f():\n    from .cli import main",
        "imports kvlink.cli of layer 6",
    ),
    "up by a string": (
        upward_imports,
        "memory/pool.py",
        "import importlib as i\ni.import_module('kvlink.cli')",
        "kvlink.cli",
    ),
    "up to the package": (upward_imports, "cli.py", "from kvlink import Cluster", "layer 6 imports kvlink of layer 7"),
    "no layer": (upward_imports, "novel.py", "", "kvlink.novel is not in LAYERS; give it a layer"),
    "circle": (load_cycles, "errors.py", "from .keys import Key", CYCLE),
    "circle in try": (load_cycles, "errors.py", "try:\n    from . import keys\nexcept ImportError: ...", CYCLE),
    "circle by the package": (
        load_cycles,
        "transports/base.py",
        "from kvlink.transports import Shm",
        "kvlink.transports -> kvlink.transports.shm -> kvlink.transports.base -> kvlink.transports",
    ),
    "extra": (undeclared_imports, "memory/pool.py", "import ml_dtypes", "pool.py:1: ml_dtypes is no dependency"),
    "extra not for types": (
        undeclared_imports,
        "memory/pool.py",
        "import typing\nif not typing.TYPE_CHECKING:\n    import trio",
        "pool.py:3: trio",
    ),
    "extra under a flag": (
        undeclared_imports,
        "memory/pool.py",
        "FAST = 1\nif FAST:\n    import trio",
        "pool.py:3: trio",
    ),
    "extra in try": (
        undeclared_imports,
        "keys.py",
        "try:\n    from uvloop import Loop\nexcept ImportError: ...",
        "uvloop",
    ),
    "ucx": (ucx_outside, "cluster.py", "def f():\n    import ucp._libs", "cluster.py:2: imports ucp._libs"),
    "libucp": (
        ucx_outside,
        "transports/shm.py",
        "import ctypes\nctypes.CDLL('libucp.so')",
        "shm.py:2: opens libucp.so",
    ),
    "memfd": (memfd_outside, "cluster.py", "import os\nos.memfd_create('x')", "cluster.py:2: memfd_create"),
    "memfd by name": (memfd_outside, "transports/base.py", "from os import memfd_create", "base.py:1: memfd_create"),
    "long": (long_files, "keys.py", "\n" * (MAX_LINES + 1), f"keys.py: {MAX_LINES + 1} lines"),
}

# What looks alike and is allowed: the file and its text.
ALLOWED: Final[dict[str, tuple[str, str]]] = {
    "as it stands": ("keys.py", SOUND["keys.py"]),
    "circle for types": ("errors.py", FOR_TYPES + "from .keys import Key"),
    "circle in a function": ("errors.py", "def f():\n    from . import keys"),
    "extra for types": ("memory/pool.py", FOR_TYPES + "import trio"),
    "just short enough": ("keys.py", "\n" * MAX_LINES),
}


def write_package(root: Path, name: str, text: str) -> dict[str, Module]:
    """Write SOUND with one file changed or added below `root`, and read it back."""
    for file, source in {**SOUND, name: text}.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return read_package(root)


@pytest.mark.parametrize("case", BROKEN)
def test_rule_finds_the_fault(tmp_path: Path, case: str) -> None:
    """Each rule says no, and says where, to a package that breaks it in one place."""
    rule, name, text, expected = BROKEN[case]
    faults = rule(write_package(tmp_path, name, text))
    assert any(expected in fault for fault in faults), faults


@pytest.mark.parametrize("case", ALLOWED)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_lets_sound_code_pass(tmp_path: Path, rule: Rule, case: str) -> None:
    """No rule says no to a package that keeps it."""
    assert rule(write_package(tmp_path, *ALLOWED[case])) == []
