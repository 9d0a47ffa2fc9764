"""`loss_on: marked`: the cross-entropy of the targets that a corpus marks, trained on and validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.model.backbone import Backbone
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import corpora, prepare
from atma_sweep.sweep.data.batches import Batches, DataError, StepPrefetcher, marked_capacity
from atma_sweep.sweep.data.corpora import open_corpus
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.planning import admission as plan
from atma_sweep.sweep.probes import bound
from attempts import room_of
from copies import published_shard
from prepared import preparation_error, prepare_corpus, rederived
from refusals import refused
from small_training import CPU, MARKS, STREAM, recipe, small_trainer
from torch import Tensor
from torch.nn import functional

Network = Callable[..., Backbone]


def marked_batches(config: Any, marks: np.ndarray = MARKS, seed: int = 0) -> Batches:
    return Batches([STREAM], config.seq_len, config.batch_tokens // config.seq_len, seed, True, marks=[marks])


# --- which targets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complete_steps", [False, True])
def test_mark_belongs_to_the_target_token(complete_steps: bool) -> None:
    """Tokens count upwards, and the tokens that five divides are marked."""
    shards = [np.arange(first, first + size, dtype=np.uint16) for first, size in ((0, 53), (100, 7), (200, 48))]
    marks = [(shard % 5 == 0).astype(np.uint16) for shard in shards]
    batches = Batches(shards, 6, 2, 3, True, complete_steps, marks)
    for step in range(9):
        targets = batches.step(step)[1]
        marks_of_step = batches.marked(step)
        assert marks_of_step is not None
        assert torch.equal(marks_of_step, targets % 5 == 0)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_marked_positions_of_each_micro_batch(rows: int) -> None:
    batches = marked_batches(recipe())
    for step in (0, 3):
        step_batch = StepPrefetcher(batches, CPU, rows).get(step)
        marked = batches.marked(step)
        assert marked is not None
        assert step_batch.marked is not None
        parts = [step_batch.targets[first : first + rows] for first in range(0, 4, rows)]
        chosen = torch.cat(
            [part.flatten()[micro.indices_M] for part, micro in zip(parts, step_batch.marked, strict=True)]
        )
        assert torch.equal(chosen, step_batch.targets[marked])
        assert torch.equal(chosen, torch.cat([micro.targets_M for micro in step_batch.marked]))
        assert {float(micro.share) for micro in step_batch.marked} == {len(parts) / int(marked.sum())}
    assert StepPrefetcher(Batches([STREAM], 6, 4, 0, True), CPU, rows).get(0).marked is None


def test_filled_up_to_a_number_that_stays() -> None:
    """Fillers come last and are no targets; a micro-batch with more than there is room for stays as it is."""
    batches, lengths = marked_batches(recipe()), set()
    for step in range(6):
        plain, filled = (StepPrefetcher(batches, CPU, 2, room).get(step).marked for room in (None, 5))
        assert plain is not None
        assert filled is not None
        for unpadded, padded in zip(plain, filled, strict=True):
            num_marked = len(unpadded.indices_M)
            lengths.add(num_marked)
            assert len(padded.indices_M) == len(padded.targets_M) == max(num_marked, 5)
            assert torch.equal(unpadded.indices_M, padded.indices_M[:num_marked])
            assert torch.equal(unpadded.targets_M, padded.targets_M[:num_marked])
            assert (padded.targets_M[num_marked:] == -1).all()
            assert padded.indices_M.max() < 12
            assert unpadded.share == padded.share
    assert min(lengths) < 5 < max(lengths)


@pytest.mark.parametrize(
    ("share", "targets", "room"), [(0.25, 16384, 4608), (1.0, 100, 100), (0.001, 4096, 64), (0.5, 128, 128)]
)
def test_room_for_marked_targets(share: float, targets: int, room: int) -> None:
    """Eight deviations above what is expected: of 100,000 draws none has more."""
    assert marked_capacity(share, targets) == room
    draws = np.random.default_rng(0).binomial(targets, share, 100_000)
    assert draws.max() <= room


def test_a_step_without_a_mark_says_so() -> None:
    with pytest.raises(DataError, match=r"step 2 has no marked target: set train\.loss_on: all"):
        marked_batches(recipe(), np.zeros(400, dtype=np.uint16)).marked(2)


# --- the objective ------------------------------------------------------------------------------------------------


def step_of(
    model: Backbone, config: Any, marks: np.ndarray | None, room: int | None = None
) -> tuple[dict[str, Tensor], float]:
    """Gradients of one step before clipping, and its loss."""
    trainer = small_trainer(model, config)
    if marks is not None:
        trainer = replace(trainer, batches=marked_batches(config, marks), marked_capacity=room)
    grads: dict[str, Tensor] = {}
    trainer.optimizers.update = lambda: grads.update(  # type: ignore[method-assign]
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    )
    done = trainer.train_step(0)
    assert done is not None
    return grads, float(done[0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("rows", "room"), [(1, None), (2, None), (4, None), (1, 6), (2, 4), (4, 24)])
def test_the_loss_is_the_mean_over_marked_targets_of_the_step(
    network: Network, rows: int, room: int | None, reduction: str
) -> None:
    """However they fall into micro-batches, filled up or not; one row here has none."""
    marks = MARKS.copy()
    config = recipe(micro_batch=rows, loss_on="marked", loss_reduction=reduction, clip=1e9)
    batches = marked_batches(config)
    empty = batches.row(1) * 6
    marks[empty + 1 : empty + 7] = 0
    model = network(awake=True, dtype=torch.float64)
    gradients, loss = step_of(model, config, marks, room)
    inputs, targets = batches.step(0)
    marked = marked_batches(config, marks).marked(0)
    assert marked is not None
    assert not marked[1].any()
    assert len(set(marked.sum(1).tolist())) > 1
    model.zero_grad()
    expected = functional.cross_entropy(model(inputs)[marked], targets[marked], reduction=reduction)
    expected.backward()
    mean = expected.item() / (int(marked.sum()) if reduction == "sum" else 1)
    assert loss == pytest.approx(mean, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() <= 1e-11, name


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_marked_is_all(network: Network, reduction: str) -> None:
    terms = {"regularizer": "weak", "distractor": True, "loss_reduction": reduction}
    marked, marked_loss = step_of(
        network(awake=True, dtype=torch.float64), recipe(loss_on="marked", **terms), np.ones(400, dtype=np.uint16)
    )
    plain, plain_loss = step_of(network(awake=True, dtype=torch.float64), recipe(**terms), None)
    assert marked_loss == pytest.approx(plain_loss, rel=1e-6)
    for name in plain:
        assert (marked[name] - plain[name]).abs().max() <= 1e-12 * 24, name


# --- corpora ------------------------------------------------------------------------------------------------------


def marked_shards(folder: Path, *, marks: bool = True) -> Path:
    """Two training shards and one of validation, byte tokens, every third marked unless without marks."""
    for name, size in (("x_train_1", 3000), ("x_train_2", 2000), ("x_val_0", 3000)):
        tokens = np.random.default_rng(size).integers(97, 123, size)
        published_shard(folder / f"{name}.bin", tokens)
        if marks:
            published_shard(folder / f"{name}.marks.bin", np.arange(size) % 3 == 0)
    return folder


def ready(path: Path) -> DataConfig:
    return DataConfig(corpus="shards", path=str(path), tokenizer="bytes")


def test_shards_bring_their_marks(tmp_path: Path) -> None:
    folder = marked_shards(tmp_path / "s")
    corpus = prepare_corpus(ready(folder), tmp_path / "c")
    assert corpus.train_marks is not None
    assert corpus.validation_marks is not None
    for marks, tokens in zip(
        [*corpus.train_marks, corpus.validation_marks], [*corpus.train, corpus.validation], strict=True
    ):
        assert marks.tolist() == [int(n % 3 == 0) for n in range(len(tokens))]
    assert corpus.train_tokens == 5000, "a mark is no token"
    assert corpus.marked_share == (1000 + 667) / 5000
    assert corpora.listing(tmp_path / "c")[0]["train_tokens"] == 5000
    assert corpus.fingerprint == rederived(corpus)
    assert corpora.verify(corpus.folder) == []  # type: ignore[arg-type]


def test_marks_change_the_corpus_fingerprint(tmp_path: Path) -> None:
    folder = marked_shards(tmp_path / "s")
    first = prepare.prepare(ready(folder), tmp_path / "c")
    published_shard(folder / "x_val_0.marks.bin", np.arange(3000) % 2)
    second = prepare.prepare(ready(folder), tmp_path / "c")
    for path in folder.glob("*.marks.bin"):
        path.unlink()
    third = prepare.prepare(ready(folder), tmp_path / "c")
    assert len({first, second, third}) == 3
    plain = open_corpus(tmp_path / "c", third)
    assert (plain.train_marks, plain.validation_marks) == (None, None)
    assert third == rederived(plain)


@pytest.mark.parametrize(("change", "message"), [
    (lambda folder: (folder / "x_train_2.marks.bin").unlink(),
     "data.path: {}/x_train_2.marks.bin is missing, but other shards have marks; add marks for all shards or none"),
    (lambda folder: published_shard(folder / "x_train_2.marks.bin", [0, 1]),
     "{}/x_train_2.marks.bin: has 2 marks for the 2000 tokens of its shard"),
    (lambda folder: published_shard(folder / "x_val_0.marks.bin", np.full(3000, 2)),
     "{}/x_val_0.marks.bin: holds the value 2, but marks must be 0 or 1"),
])  # fmt: skip
def test_marks_that_cannot_be(tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    folder = marked_shards(tmp_path / "s")
    change(folder)
    assert preparation_error(ready(folder), tmp_path / "c") == message.format(folder)


# --- a whole attempt ----------------------------------------------------------------------------------------------


def test_shards_without_marks_are_refused_before_training(tmp_path: Path, grid: Path) -> None:
    folder = marked_shards(tmp_path / "s", marks=False)
    sets = ("data.corpus=shards", f"data.path={folder}", "eval.probes=[val]", "train.loss_on=marked")
    room = room_of(grid, tmp_path, *sets)
    assert refused(lambda: plan.check_corpora([room.cell], grid.parent / "corpora"), corpora.CorpusError) == (
        "corpus 'shards': it marks no tokens, but train.loss_on: marked needs marks; set train.loss_on: all, or add a NAME.marks.bin "
        "for each shard NAME.bin"
    )


def test_a_corpus_with_a_name_knows_whether_it_has_marks(tmp_path: Path, grid: Path) -> None:
    folder, bare = marked_shards(tmp_path / "s"), marked_shards(tmp_path / "bare", marks=False)
    for name, path in (("with", folder), ("without", bare)):
        prepare.prepare(ready(path), grid.parent / "corpora", name=name)

    def room(name: str) -> Any:
        return room_of(grid, tmp_path, f"data.corpus={name}", "eval.probes=[val]", "train.loss_on=marked")

    plan.check_corpora([room("with").cell], grid.parent / "corpora")
    assert refused(lambda: room("without"), GridError) == (
        "--set: train.loss_on: corpus without does not mark which tokens count; set train.loss_on: all, or use a "
        "corpus that can: shards, flipflop, mqar, mad"
    )


@pytest.mark.thorough
def test_an_attempt_trains_and_validates_on_marked_targets(
    tmp_path: Path, grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = marked_shards(tmp_path / "s")
    sets = ("data.corpus=shards", f"data.path={folder}", "eval.probes=[val]")
    rooms = [room_of(grid, tmp_path, *sets, f"train.loss_on={word}") for word in ("all", "marked")]
    attempts = [room.run() for room in rooms]
    assert [attempt.state for attempt in attempts] == ["done", "done"]
    assert rooms[0].cell.id != rooms[1].cell.id
    curves = [room.curve(attempt) for room, attempt in zip(rooms, attempts, strict=True)]
    assert all(first[1:3] != second[1:3] for first, second in zip(*curves, strict=True))
    rows = [
        {m.metric: m for m in room.store.measurements(room.cell.id) if m.probe == "val"}["val_loss"]
        for room in rooms
    ]  # fmt: skip
    assert [row.unit for row in rows] == ["nats/token", "nats/marked token"]
    missing = bound("val", rooms[1].cell.config).missing("oom: too large")
    assert (missing.metric, missing.unit) == ("val_loss", "nats/marked token")
    assert rows[1].n == sum(n % 3 == 0 for n in range(1, rows[0].n + 1))
    assert rows[1].value == pytest.approx(curves[1][-1][2])
    assert "12 steps of 128 tokens, loss on marked targets, from the first step" in capsys.readouterr().out
