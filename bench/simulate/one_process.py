"""A step of several devices that one process drives (`torch.nn.DataParallel`), as the first and the others meet it.

The model runs on every device's part of the batch. The loss is computed on the first, over the outputs of all. In
forward each device's kernels are started by a Python thread of its own, and only one of them runs at a time (the global
interpreter lock): while one kernel is started here, one is on each other device, so that a kernel takes as many times
longer to start as there are devices. Backward is started by autograd's threads, one per device, which need no Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.simulate.reel import Piece, Scene
from bench.simulate.tape import LOSS


def of_first(scenes: Sequence[Scene], of_all: Sequence[Scene], devices: int) -> tuple[Scene, ...]:
    """What the first device does.

    Parameters
    ----------
    scenes, of_all: sequence of Scene
        Of a device's part of the batch, and of the whole batch: the loss is taken from these.
    """
    made = []
    left = lasting_left = 0.0
    for scene, whole in zip(scenes, of_all, strict=True):
        if scene.place == LOSS:
            left += _sum(whole, "net") - _sum(scene, "net")
            lasting_left += _sum(whole, "lasting_net") - _sum(scene, "lasting_net")
            made.append(whole)
        elif scene.phase == "backward" and left:
            # The gradient of all outputs goes when the model's last layer has used its part of it.
            last = scene.pieces[-1]
            last = dataclasses.replace(last, net=last.net - left, lasting_net=last.lasting_net - lasting_left)
            made.append(dataclasses.replace(scene, pieces=(*scene.pieces[:-1], last)))
            left = lasting_left = 0.0
        elif scene.phase == "forward":
            pieces = (dataclasses.replace(piece, kernels=piece.kernels * devices) for piece in scene.pieces)
            made.append(dataclasses.replace(scene, pieces=tuple(pieces)))
        else:
            made.append(scene)
    return tuple(made)


def of_other(scenes: Sequence[Scene]) -> tuple[Scene, ...]:
    """What any other device does: no loss, of whose gradient its part arrives."""
    return tuple(
        dataclasses.replace(scene, pieces=(_arrives(_sum(scene, "net"), _sum(scene, "lasting_net")),))
        if scene.place == LOSS
        else scene
        for scene in scenes
    )


def _arrives(net: float, lasting_net: float) -> Piece:
    """Memory that is taken (negative: given back), and no work."""
    most = max(net, 0.0)
    return Piece(
        peak=most,
        lasting_at_peak=min(most, max(lasting_net, 0.0)),
        net=net,
        lasting_net=lasting_net,
        seconds=0.0,
        kernels=0,
        gradient=None,
    )


def _sum(scene: Scene, name: str) -> float:
    return sum(float(getattr(piece, name)) for piece in scene.pieces)
