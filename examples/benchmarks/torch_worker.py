"""One configuration of PyTorch: the dense model with torch.distributed.pipelining, with torchgpipe, or in one piece.

Speaks as worker.py does. The pipeline of torch.distributed has a process for each stage, which talk over gloo.
"""

import json
import os
import sys
import tempfile
import time
import warnings

CONFIG = json.loads(sys.argv[1])
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: CONFIG["cores"]])

import torch  # noqa: E402
from torch import distributed, multiprocessing, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


class Recomputed(nn.Module):
    """A module whose activations are recomputed in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the module returns."""
        return checkpoint(self.inner, x, use_reentrant=False)


def layers(count: int) -> list[nn.Module]:
    """`count` dense layers, each a module of its own."""
    width = CONFIG["sizes"]["width"]
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


def mini_batch() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (CONFIG["sizes"]["rows"], CONFIG["sizes"]["width"])
    return torch.randn(shape), torch.randn(shape)


def pipelining_step(stage: int):
    """Returns a function that takes one step as stage `stage` of `torch.distributed.pipelining`."""
    from torch.distributed import pipelining

    stages, count = CONFIG["stages"], CONFIG["micro_batches"]
    module = nn.Sequential(*layers(CONFIG["sizes"]["layers"] // stages))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if CONFIG["remat"] == "always":
        module = Recomputed(module)
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[CONFIG["engine"]]
    part = pipelining.PipelineStage(module, stage, stages, torch.device("cpu"))
    schedule = kind(part, n_microbatches=count, loss_fn=nn.functional.mse_loss)
    x, y = mini_batch()

    def step() -> None:
        optimizer.zero_grad()
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()

    return step


def torchgpipe_step():
    """Returns a function that takes one step with torchgpipe."""
    from torchgpipe import GPipe

    stages, count = CONFIG["stages"], CONFIG["sizes"]["layers"]
    balance = [count // stages] * stages
    options = {"chunks": CONFIG["micro_batches"], "checkpoint": CONFIG["remat"]}
    return step_of(GPipe(nn.Sequential(*layers(count)), balance, devices=["cpu"] * stages, **options))


def plain_step():
    """Returns a function that takes one step with the model in one piece."""
    return step_of(nn.Sequential(*layers(CONFIG["sizes"]["layers"])))


def step_of(model: nn.Module):
    """Returns a function that takes one step with a model that is called as a whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = mini_batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def timed(step, steps: int) -> float:
    """Seconds of `steps` steps, from when all processes are ready to when all are done."""
    together = distributed.barrier if distributed.is_initialized() else lambda: None
    together()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    together()
    return time.perf_counter() - start


def serve(stage: int, store: str | None, requests, replies) -> None:
    """Takes numbers of steps from a queue; stage 0 puts the seconds that they took into another."""
    torch.set_num_threads(CONFIG["intra"])
    if store is not None:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=stage, world_size=CONFIG["stages"])
    alone = {"torchgpipe": torchgpipe_step, "plain": plain_step}.get(CONFIG["engine"])
    step = alone() if alone else pipelining_step(stage)
    while steps := requests.get():
        seconds = timed(step, steps)
        if stage == 0:
            replies.put(seconds)
    if store is not None:
        distributed.destroy_process_group()


def main() -> None:
    warnings.filterwarnings("ignore")
    count = 1 if CONFIG["engine"] in ("torchgpipe", "plain") else CONFIG["stages"]
    context = multiprocessing.get_context("spawn")
    queues, replies = [context.Queue() for _ in range(count)], context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store") if count > 1 else None
        args = [(stage, store, queue, replies) for stage, queue in enumerate(queues)]
        processes = [context.Process(target=serve, args=arg, daemon=True) for arg in args]
        for process in processes:
            process.start()

        def ask(steps: int) -> float:
            for queue in queues:
                queue.put(steps)
            return replies.get(timeout=300) / max(steps, 1)

        first = ask(1)
        steps = max(2, round(CONFIG["measure_seconds"] / ask(1)))
        print(json.dumps({"seconds": first, "steps": steps, "version": torch.__version__}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"seconds": ask(steps)}), flush=True)
        for queue in queues:
            queue.put(0)
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
