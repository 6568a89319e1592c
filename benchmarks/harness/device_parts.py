"""Parts of one GPU as devices: streams of green contexts, each with multiprocessors of its own.

The shares are groups of one split, which no two contexts have in common. ``torch.cuda.green_contexts`` splits again for
each context, and gives all the same ones (pytorch#195378), so the driver is asked, through cuda-python.
"""

from __future__ import annotations

from typing import Any

import torch


def parts(device: str, count: int) -> list[Any]:
    """So many devices: streams of green contexts with equal shares of a GPU, or the CPU as often.

    Nothing here destroys the contexts, so the streams are theirs until the process ends.
    """
    if device == "cpu":
        return ["cpu"] * count
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError("parts of a GPU are made through cuda-python: expected pip install cuda-python.") from error

    def checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
        status, *values = answer
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver says {status}: expected a GPU and a driver with green contexts.")
        return tuple(values)

    index = torch.device(device).index or 0
    torch.cuda.synchronize(index)  # The driver knows of no device before.
    (handle,) = checked(driver.cuDeviceGet(index))
    (whole,) = checked(driver.cuDeviceGetDevResource(handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    share = whole.sm.smCount // count // 8 * 8  # Shares come in eights.
    groups, made, _ = checked(driver.cuDevSmResourceSplitByCount(count, whole, 0, share))
    if made < count:
        raise RuntimeError(f"{whole.sm.smCount} multiprocessors make {made} parts of {share}: expected {count}.")
    streams = []
    for group in groups[:count]:
        (described,) = checked(driver.cuDevResourceGenerateDesc([group], 1))
        kind = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        (context,) = checked(driver.cuGreenCtxCreate(described, handle, kind))
        (stream,) = checked(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        streams.append(torch.cuda.ExternalStream(int(stream), device=index))
    return streams
