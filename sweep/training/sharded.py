"""Optimizers whose states and updates are divided over several ranks (ZeRO stage 1)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...model.backbone import Backbone
from ..config import TrainConfig
from ..ranks.group import SINGLE, Ranks
from ..ranks.shards import GradientReducer, WeightExchange, assign_owners, reduction_dtype
from .optimizers import HeadBlocks, Muon, Optimizers

ADAM_COST = 5_000
"""Cost of AdamW's update of one number in FLOPs of a matrix product that take as long (28 bytes at 3 TB/s)."""

GROUP = 1 << 23
"""Elements of matrices that a rank orthogonalises together: large enough to occupy a GPU, small enough that the exchange
of weights starts early."""


def newton_schulz_flops(shape: torch.Size, iterations: int, blocks: tuple[int, int] = (1, 1)) -> int:
    """Return the FLOPs of orthogonalising a parameter of this shape, whose last two axes are a matrix.

    Its rows and columns are cut into `blocks` parts. With R rows and C columns, R <= C, an iteration takes 2 R R C + 2 R R R + 2 R R C.
    """
    rows, columns = sorted(size // parts for size, parts in zip(shape[-2:], blocks, strict=True))
    matrices = shape.numel() // (rows * columns)
    return matrices * iterations * (4 * rows * rows * columns + 2 * rows**3)


class _Placeholder(NamedTuple):
    """Tensor of an optimizer's state that travels by itself."""

    shape: torch.Size
    dtype: torch.dtype


class ShardedOptimizers(Optimizers):
    """Optimizers of a model that every rank has, each parameter updated by its owner alone.

    Gradients are added into their owners during the last backward pass (`expect_gradients`); the norm is that of all
    parameters; updated weights go to every rank before `update` returns. Owners hold the only optimizer state; a saved
    state is complete and does not depend on the number of ranks. Every rank calls every method, in the same order.
    """

    def __init__(
        self,
        groups: dict[str, list[tuple[str, nn.Parameter]]],
        config: TrainConfig,
        device: torch.device,
        ranks: Ranks,
        *,
        rates_on_device: bool | None = None,
        head_blocks: HeadBlocks | None = None,
    ) -> None:
        """Assign the parameter groups to optimizers, and every parameter to its owner.

        Args:
            groups: `Backbone.parameter_groups()`.
            config: training settings, as for `Optimizers`.
            device: device of this rank's parameters.
            ranks: group of the ranks.
            rates_on_device: as for `Optimizers`.
            head_blocks: as for `Optimizers`.
        """
        super().__init__(groups, config, device, rates_on_device=rates_on_device, head_blocks=head_blocks)
        self.ranks, self._device = ranks, device
        muon = self.by_name.get("muon")
        matrices = (
            {p: muon.blocks(p) for group in muon.param_groups for p in group["params"]}
            if isinstance(muon, Muon)
            else {}
        )
        costs = [
            newton_schulz_flops(p.shape, config.muon_iterations, matrices[p])
            if p in matrices
            else ADAM_COST * p.numel()
            for p in self.parameters
        ]
        self.owner_of = dict(zip(self.parameters, assign_owners(costs, ranks.size), strict=True))
        """Owner of each parameter, a rank."""
        # vectors of all blocks share packs, which are complete once the first block is
        order = [parameter for name in ("embedding", "scalar", "muon", "head") for _, parameter in groups[name]]
        self._reducer = GradientReducer(ranks, order, [self.owner_of[p] for p in order])

    @property
    def _owned(self) -> list[nn.Parameter]:
        return [p for p in self.parameters if self.owner_of[p] == self.ranks.rank]

    def expect_gradients(self) -> None:
        """Add gradients over ranks during the next backward pass, which is the last of the step."""
        self._reducer.arm()

    def reduce_gradients(self) -> None:
        """Finish adding gradients over ranks: each owner then has those of its parameters, others have none."""
        self._reducer.finish()

    def clip(self, max_norm: float) -> Tensor:
        """Finish adding gradients over ranks, and scale them so that the norm of all is at most `max_norm`.

        Returns:
            The norm before clipping over the parameters of all ranks, as for `Optimizers.clip`, equal on every rank.
        """
        self.reduce_gradients()
        owned = self._owned
        if self.scaling is not None:
            self.scaling.unscale(owned)
            self.scaling.agree(self.ranks)
        gradients = [p.grad for p in owned if p.grad is not None]
        dtype = reduction_dtype(self.parameters[0].dtype)
        square = torch.zeros((), dtype=dtype, device=self._device)
        if gradients:
            square += torch.nn.utils.get_total_norm(gradients).to(dtype).square()
        norm = self.ranks.sum_(square).sqrt()
        torch.nn.utils.clip_grads_with_norm_(owned, max_norm, norm)
        return norm if self.scaling is None else self.scaling.reported_norm(norm)

    def update(self) -> None:
        """Update the parameters that this rank owns, and exchange updated weights with all ranks.

        AdamW's weights travel first. Matrices of one shape are updated in groups of up to `GROUP` elements per rank; the
        weights of a group travel while the next one is computed.
        """
        if self.scaling is not None and not self.scaling.update_scale():
            return
        if self._device_rates is not None:
            self._device_rates.refresh()
        exchange = WeightExchange(self.ranks)
        self.by_name["adam"].step()
        adam = [p for group in self.by_name["adam"].param_groups for p in group["params"]]
        exchange.start((p, self.owner_of[p]) for p in adam)
        muon = self.by_name.get("muon")
        if isinstance(muon, Muon):
            for group in muon.param_groups:
                # the last group's weights travel while nothing is computed, so it is of the smallest shape
                for params in sorted(muon.stacks(group), key=lambda params: -len(params) * params[0].numel()):
                    for by_owner in self._equal_parts(params):
                        own = by_owner[self.ranks.rank]
                        muon.update_shape([p for p in own if p.grad is not None], group)
                        exchange.gather(by_owner)
        exchange.finish()

    def _equal_parts(self, params: list[nn.Parameter]) -> list[list[list[nn.Parameter]]]:
        """Divide parameters of one shape into parts of at most `GROUP` elements per rank; a part has a list per rank."""
        by_owner: list[list[nn.Parameter]] = [[] for _ in range(self.ranks.size)]
        for p in params:
            by_owner[self.owner_of[p]].append(p)
        most = max(1, GROUP // params[0].numel())
        count = max(-(-len(owned) // most) for owned in by_owner)
        return [[owned[index::count] for owned in by_owner] for index in range(count)]

    def discard(self) -> None:
        """End the step without an update and drop its gradients, none of which may be on their way."""
        self._reducer.discard()
        super().discard()

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state on rank 0, as `Optimizers.state_dict` does; on other ranks their own part.

        Tensors of other ranks arrive on rank 0 one by one and lie on the CPU.
        """
        state = super().state_dict()
        for name, optimizer in self.by_name.items():
            members = [p for group in optimizer.param_groups for p in group["params"]]
            own = state[name]["state"]
            skeletons = self.ranks.gather_objects(_skeleton(own, self._device))
            complete: dict[int, dict[str, Any]] = {}
            for index, parameter in enumerate(members):
                owner = self.owner_of[parameter]
                if index in skeletons[owner]:
                    mine = own[index] if owner == self.ranks.rank else None
                    complete[index] = self._transfer(skeletons[owner][index], mine, owner, 0)
            if self.ranks.is_first:
                state[name]["state"] = complete
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the complete state that rank 0 passes; other ranks receive what belongs to their parameters.

        Args:
            state: complete state on rank 0; ignored on other ranks.
        """
        shell = {
            name: part if name == "scaling" else {**part, "state": _skeleton(part["state"], None)}
            for name, part in (state.items() if self.ranks.is_first else ())
        }
        shell = self.ranks.agree(shell)
        for name, optimizer in self.by_name.items():
            members = [p for group in optimizer.param_groups for p in group["params"]]
            received: dict[int, dict[str, Any]] = {}
            for index, skeleton in shell[name]["state"].items():
                mine = state[name]["state"][index] if self.ranks.is_first else None
                owner = self.owner_of[members[index]]
                entry = self._transfer(skeleton, mine, 0, owner)
                if owner == self.ranks.rank:
                    received[index] = entry
            shell[name]["state"] = received
        super().load_state_dict(shell)

    def _transfer(
        self, skeleton: dict[str, Any], mine: dict[str, Any] | None, sender: int, receiver: int
    ) -> dict[str, Any]:
        """Return the state of one parameter, on the CPU where it was received; incomplete on ranks that take no part.

        Args:
            skeleton: its state, with placeholders for tensors that travel by themselves.
            mine: the state itself on the sending rank; None elsewhere.
            sender: the rank that has it.
            receiver: the rank that needs it.
        """
        if sender == receiver:
            return mine or {}
        entry = dict(skeleton)
        for key, value in skeleton.items():
            if not isinstance(value, _Placeholder):
                continue
            if mine is not None:
                tensor = mine[key].to(self._device).contiguous()
            else:
                tensor = torch.empty(value.shape, dtype=value.dtype, device=self._device)
            work = self.ranks.broadcast_async(tensor, sender)
            if work is not None:
                work.wait()
            if self.ranks.rank == receiver:
                entry[key] = tensor.cpu()
        return entry


def _skeleton(states: dict[int, dict[str, Any]], device: torch.device | None) -> dict[int, dict[str, Any]]:
    """Return states by parameter with placeholders for their tensors of one or more axes; others are copied.

    Args:
        states: state of each parameter, by its index.
        device: leave tensors on other devices as they are; None: whatever their device.
    """
    return {
        index: {
            key: _Placeholder(value.shape, value.dtype)
            if isinstance(value, Tensor) and value.ndim and (device is None or value.device == device)
            else value.cpu()
            if isinstance(value, Tensor)
            else value
            for key, value in entry.items()
        }
        for index, entry in states.items()
    }


def build_optimizers(model: Backbone, config: TrainConfig, device: torch.device, ranks: Ranks = SINGLE) -> Optimizers:
    """Return the optimizers of a model, divided over the ranks if there are several.

    Args:
        model: the network.
        config: training settings.
        device: device of this rank's parameters.
        ranks: group of the ranks.
    """
    groups, head_blocks = model.parameter_groups(), model.head_blocks()
    if ranks.size == 1:
        return Optimizers(groups, config, device, head_blocks=head_blocks)
    return ShardedOptimizers(groups, config, device, ranks, head_blocks=head_blocks)
