"""Answer prompts with two processes: P reads each prompt, D writes the answer, and the KV cache goes from P to D.

P (role PROMPT) prefills every prompt into blocks of its cache and hands over their numbers. D (role DECODER) pulls them
into other blocks of its own and decodes greedily from there. D gets no logits: for its first token it runs the prompt's
last one again, as serving engines do. Meanwhile P answers alone, in plain numpy arrays: the tokens must be the same.
``--zero-one-block`` is the control run: D wipes one of the blocks that it pulled, and that answer alone must change.
With ``KVLINK_TRANSPORTS=ucx`` in the environment the blocks move over UCX instead of shared memory.
"""

import argparse
import os
import sys
from functools import partial
from multiprocessing.connection import Connection
from textwrap import fill

import smollm2
from anyio import to_thread
from two_processes import receive, run_both

import kvlink as kv

NUM_BLOCKS, TOKENS_PER_BLOCK, LIMIT = 32, 16, 32
KEY = kv.BlocksCacheKey(1)
WIPED_PROMPT, WIPED_BLOCK = 3, 3  # the control run's: the block that says when the lighthouse was built


async def read_prompts(pipe: Connection) -> int:
    """Be P: prefill into the blocks of a kvlink cache, hand the block numbers over, then answer alone."""
    model, tokenizer = await to_thread.run_sync(smollm2.load)
    desc = kv.CacheDesc(model.config.num_tensors, model.config.cache_shape(NUM_BLOCKS, TOKENS_PER_BLOCK), "float32")
    prompts = [prompt.token_ids(tokenizer) for prompt in smollm2.PROMPTS]
    free = list(range(NUM_BLOCKS))
    async with kv.Cluster(cluster_id=1, role=kv.Role.PROMPT, listen="127.0.0.1:0", pool="32MiB") as cluster:
        cache = cluster.kv_cache_manager.allocate_blocks_cache(desc, KEY)
        pipe.send(cluster.address)
        for token_ids in prompts:
            blocks = [free.pop(0) for _ in range(smollm2.blocks_for(len(token_ids), TOKENS_PER_BLOCK))]
            sequence = smollm2.PagedSequence(tensors=cache.tensors, block_table=blocks)
            await to_thread.run_sync(model.prefill, token_ids, sequence)
            pipe.send((token_ids, blocks))
        pipe.send([await smollm2.answer_alone(model, tokenizer, token_ids=ids, limit=LIMIT) for ids in prompts])
        await receive(pipe)  # D says that it needs this cache no more
    return 0


async def write_answers(pipe: Connection, *, wipe: bool) -> int:
    """Be D: pull the blocks of each prompt, write its answer, then compare with what P answers alone."""
    model, tokenizer = await to_thread.run_sync(smollm2.load)
    desc = kv.CacheDesc(model.config.num_tensors, model.config.cache_shape(NUM_BLOCKS, TOKENS_PER_BLOCK), "float32")
    free, answers, reports = list(range(NUM_BLOCKS)), [], []
    async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="32MiB") as cluster:
        cache = cluster.kv_cache_manager.allocate_blocks_cache(desc)
        peer = kv.ClusterInfo(cluster_id=1, address=await receive(pipe))
        (await cluster.link_clusters([peer], timeout_s=10)).raise_for_status()
        for number, prompt in enumerate(smollm2.PROMPTS):
            token_ids, blocks = await receive(pipe)
            table = [free.pop() for _ in range(smollm2.blocks_for(len(token_ids) + LIMIT, TOKENS_PER_BLOCK))]
            pulled = table[: len(blocks)]
            reports.append(report := await cluster.kv_cache_manager.pull_blocks(KEY, cache, blocks, pulled))
            print(f"\n{fill(prompt.text)}\n  [{len(token_ids)} tokens, blocks {blocks} of P -> {pulled} of D", end="")
            print(f", {report.nbytes / 1e6:.1f} MB at {report.gb_per_s:.1f} GB/s]")
            if wipe and number == WIPED_PROMPT:
                for tensor in cache.tensors:
                    tensor[pulled[WIPED_BLOCK]] = 0
            sequence = smollm2.PagedSequence(tensors=cache.tensors, block_table=table, length=len(token_ids) - 1)
            last = token_ids[-1:]
            answers.append(await smollm2.write_answer(model, tokenizer, token_ids=last, sequence=sequence, limit=LIMIT))
        alone = await receive(pipe)
        (await cluster.unlink_clusters([1])).raise_for_status()
        pipe.send("done")
    nbytes, seconds = sum(report.nbytes for report in reports), sum(report.duration_s for report in reports)
    print(f"\nmoved {nbytes / 1e6:.1f} MB over {reports[0].transport} at {nbytes / seconds / 1e9:.2f} GB/s")
    changed = [number for number, answer in enumerate(answers) if answer != alone[number]]
    print(f"{len(answers) - len(changed)} of {len(answers)} answers equal those of one undivided process")
    for number in changed:
        print(f"answer {number + 1} differs; undivided it is: {tokenizer.decode(alone[number])!r}")
    is_right = changed == ([WIPED_PROMPT] if wipe else [])
    if wipe:
        print("control: wiping one block changed", "that answer alone" if is_right else "OTHER ANSWERS")
    return 0 if is_right else 1


def main() -> int:
    """Run P and D; return 0 if all went as it must, 1 if not, 2 if a package is missing."""
    parser = argparse.ArgumentParser(description="Prefill in one process, decode in another one.")
    parser.add_argument("--zero-one-block", action="store_true", help="control run: one answer must change")
    wipe = parser.parse_args().zero_one_block
    if missing := smollm2.missing_packages():
        print(*missing, sep="\n", file=sys.stderr)
        return 2
    # One BLAS thread in each process: two in each wait for one another, 4 tokens/s instead of 20 on two busy cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    print("P and D load SmolLM2-135M-Instruct ...", flush=True)
    return run_both({"P": read_prompts, "D": partial(write_answers, wipe=wipe)}, timeout_s=300)


if __name__ == "__main__":
    sys.exit(main())
