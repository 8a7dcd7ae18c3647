"""Rounds of alternating measurements: every contender saves and loads the same state, each round in another order."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.cold import evict
from harness.contenders import Contender
from harness.sample import Sample, Timing, measure
from harness.state import Spec, State, assert_equal, bytes_of, specs_of
from harness.workspace import remove

# What each child saves and loads first, so that lazy imports are not measured.
WARM_UP = "warm-up"


@dataclass
class Results:
    """Samples by contender, in the order of the rounds; `skipped` says what was left out and why."""

    payload_bytes: int
    saves: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    loads: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    skipped: list[str] = field(default_factory=list)
    cold_by: str = ""
    warm_share_max: float | None = None


def duel(
    contenders: Sequence[Contender],
    state: State,
    directory: Path,
    *,
    rounds: int,
    tiny: State,
    enter: Callable[[], None] | None = None,
    saves: Callable[[Contender], bool] = lambda _: True,
    tell: Callable[[str], None] = lambda _: None,
) -> Results:
    """Save, evict, load and compare, `rounds` times; contender i is i-th in the first round and moves up one a round.

    Where `saves` says no, the file is still written (outside the cap, not measured) so that its load can be.
    Raises MeasurementFailed when a contender fails or loads anything but what it saved.
    """
    results = Results(bytes_of(state))
    specs = specs_of(state)
    for index in range(rounds):
        shift = index % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            tell(f"round {index + 1}/{rounds}: {contender.name}")
            path = directory / f"checkpoint{contender.suffix}"
            try:
                measured = saves(contender)
                sample = measure(
                    _saving(contender, state, path),
                    warm_up=_warming(contender, tiny, directory),
                    enter=enter if measured else None,
                )
                if measured and contender.saves:
                    results.saves[contender.name].append(sample)
                results.cold_by, share = evict(path)
                if share is not None:
                    results.warm_share_max = max(share, results.warm_share_max or 0.0)
                results.loads[contender.name].append(
                    _load(contender, state, specs, path, tiny, directory, enter)
                )
            finally:
                remove(path)
    return results


def _load(
    contender: Contender,
    state: State,
    specs: Mapping[str, Spec],
    path: Path,
    tiny: State,
    directory: Path,
    enter: Callable[[], None] | None,
) -> Sample:
    # A list, because the child must let the tensors live until they have been compared.
    loaded: list[State] = []

    def action() -> Timing | None:
        answer = contender.load(path, specs)
        if isinstance(answer, dict):
            loaded.append(answer)
            return None
        return answer

    def check() -> None:
        if contender.role in ("ours", "peer"):
            assert_equal(loaded[0], state)

    def prepare() -> None:
        if contender.prepare_load is not None:
            contender.prepare_load(specs)

    return measure(
        action,
        prepare=prepare,
        warm_up=_warming(contender, tiny, directory),
        enter=enter,
        check=check,
    )


def _saving(contender: Contender, state: State, path: Path) -> Callable[[], Timing | None]:
    return lambda: contender.save(state, path)


def _warming(contender: Contender, tiny: State, directory: Path) -> Callable[[], None]:
    def warm_up() -> None:
        if contender.role not in ("ours", "peer"):
            return
        path = directory / f"{WARM_UP}{contender.suffix}"
        try:
            contender.save(tiny, path)
            contender.load(path, specs_of(tiny))
        finally:
            remove(path)

    return warm_up
