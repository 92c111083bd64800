"""python lost_rank.py folder: three ranks, of which one dies or stops in the middle; the others write what they got."""

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nomax.parallel import attention

TIMEOUT = timedelta(seconds=5)  # after which a rank that does not answer counts as lost


def rank_of(rank: int, folder: Path, way: str, schedule: str, pass_: str, over: object) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/{way}-{schedule}-{pass_}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("sequence",))
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = attention(x, x, x, mesh=mesh, schedule=schedule)  # all are well
    if rank == 1:
        if way == "stops":
            over.wait()
        os._exit(0)
    try:
        out.sum().backward() if pass_ == "backward" else attention(x, x, x, mesh=mesh, schedule=schedule)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    (folder / f"{way}-{schedule}-{pass_}-{rank}.txt").write_text(said)
    os._exit(0)  # without the group's own farewell, which would wait for the lost rank


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    for case in sys.argv[2:]:
        over = context.Event()
        inputs = (Path(sys.argv[1]), *case.split("-"), over)
        children = [context.Process(target=rank_of, args=(rank, *inputs)) for rank in range(3)]
        for child in children:
            child.start()
        children[0].join()
        children[2].join()
        over.set()
        children[1].join()
