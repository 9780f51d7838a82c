"""Does what is missing, the most important first: trainings, then what claims need to know of them.

Every result is a file of its own, written in one step. A training that was stopped goes on from its checkpoint, a
measurement that was stopped is done again, and so is what was declared otherwise since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.claims import trained as training_ways
from benchmarks.claims.claims import CLAIMS
from benchmarks.claims.data import NotAtHand, find_data
from benchmarks.claims.measures import FREE, KINDS, VERSIONS
from benchmarks.claims.store import JSON, Store, circumstances, fingerprint
from benchmarks.claims.trained import Trained, given_folder, is_finished
from benchmarks.claims.trainings import MEASURING, Scale, Training
from cnmm._errors import UserError
from cnmm._files import checksum, write_json
from cnmm.cli.signals import stopping
from cnmm.frontier import FRONTIER_FILE
from cnmm.run_folder import WEIGHTS_FILE

SKIPPED = "skipped.json"
NO_IMAGES = (*FREE, "wall_time")
"""Kinds that need none."""
OTHERS = {"cifar10": "cifar100", "cifar100": "cifar10"}
"""Images of classes that a model does not know."""

Say = Callable[[str], None]


def needed_kinds(scale: Scale) -> dict[str, list[str]]:
    """By training: the kinds of measurement that claims ask of it."""
    wanted: dict[str, list[str]] = {training.name: [] for training in scale.trainings}
    for claim in CLAIMS:
        for asked in claim.cases:
            for need in asked.needs.values():
                kind, _, role = need.partition(":")
                for training in scale.of(role):
                    if kind not in wanted[training.name]:
                        wanted[training.name].append(kind)
    return wanted


def measuring_minutes(training: Training, scale: Scale) -> float:
    """About what measuring takes that claims ask of a training."""
    kinds = needed_kinds(scale)[training.name]
    return scale.measuring * training.weight * sum(MEASURING.get(kind, 0.0) for kind in kinds)


def training_fingerprint(training: Training) -> str:
    """Of a given model, its weights are part of it."""
    declared = training.declared()
    if training.how == "given":
        folder = given_folder(training)
        names = (WEIGHTS_FILE, FRONTIER_FILE)
        declared["checksums"] = {name: checksum(folder / name) for name in names if (folder / name).is_file()}
    return fingerprint(declared)


def measurement_fingerprint(kind: str, training: Training, scale: Scale) -> str:
    """Of what is measured, on what, and on how much of it."""
    if kind in FREE:
        amount: list[object] = []
    else:
        amount = [scale.points, scale.images, list(scale.samples), scale.rounds]
    return fingerprint([kind, VERSIONS[kind], training_fingerprint(training), amount])


@dataclass
class Runner:
    """One call of the command."""

    scale: Scale
    runs: Path
    store: Store
    data_dirs: Sequence[Path]
    say: Say
    only: Sequence[str] = ()
    after: Callable[[], None] = lambda: None
    """Is called whenever there are new results."""
    skipped: dict[str, str] = field(default_factory=dict)
    spent: list[tuple[float, float]] = field(default_factory=list)
    """Declared and actual minutes of what was done."""

    def run(self) -> None:
        """Everything that is missing."""
        wanted, chosen = needed_kinds(self.scale), self.chosen()
        self.skipped = self._still_skipped(chosen)
        for number, training in enumerate(chosen, start=1):
            words = f"{number}/{len(chosen)} {training.name}"
            try:
                done = self._do(training, wanted[training.name], words, chosen[number - 1 :])
            except UserError as error:
                self.skipped[training.name], done = str(error), False
                self.say(f"{words}: not run, because {error}")
            self._write_skipped()
            if done:
                self.after()

    def _write_skipped(self) -> None:
        self.store.folder.mkdir(parents=True, exist_ok=True)
        places = [self.runs, *self.data_dirs]
        why = {name: without_places(words, places) for name, words in sorted(self.skipped.items())}
        write_json(self.store.folder / SKIPPED, {"why": why})

    def _still_skipped(self, chosen: Sequence[Training]) -> dict[str, str]:
        """What was skipped before, of what is declared and is not tried again now."""
        before = (self.store.read(self.store.folder / SKIPPED) or {}).get("why", {})
        declared = {each.name: each for each in self.scale.trainings}
        kept = {}
        for name, words in before.items():
            kind, _, training = name.rpartition(".")
            again = training in {each.name for each in chosen} and self._asked(kind, declared[training])
            if training in declared and not again:
                kept[name] = words
        return kept

    def chosen(self) -> list[Training]:
        """Those that were asked for, by role or by name."""
        names = [{each.name, *each.roles, *(f"{kind}.{each.name}" for kind in KINDS)} for each in self.scale.ordered()]
        for name in self.only:
            if not any(name in each for each in names):
                raise UserError(f"--only {name}: no training of scale {self.scale.name}; --list prints them")
        pairs = zip(self.scale.ordered(), names, strict=True)
        return [each for each, known in pairs if not self.only or known & set(self.only)]

    def _do(self, training: Training, kinds: list[str], words: str, left: Sequence[Training]) -> bool:
        """Trains and measures what is missing of a training. Was there something to do?"""
        done = training_fingerprint(training)
        missing = [kind for kind in kinds if self._asked(kind, training) and self._measured(kind, training) is None]
        if self.store.read(self.store.training(training.name), done) is not None and not missing:
            return False
        if training.how == "given":
            self._record(training, {"model": training.network, "minutes": 0.0}, done)
        else:
            self._train(training, words, left)
        for kind in missing:
            try:
                self._measure(kind, training, words)
            except UserError as error:
                self.skipped[f"{kind}.{training.name}"] = str(error)
                self.say(f"{words}: {kind} not measured, because {error}")
        return True

    def _asked(self, kind: str, training: Training) -> bool:
        """Of a training that was named with a kind, only this kind."""
        named = [name for name in self.only if name in (f"{each}.{training.name}" for each in KINDS)]
        return not named or f"{kind}.{training.name}" in named

    def _find_data(self, training: Training) -> str:
        return find_data(self.scale.data[training.data], self.data_dirs, self.runs)

    def _open(self, training: Training, data: str) -> Trained:
        folder = given_folder(training) if training.how == "given" else self.runs / training.name
        trained, other = Trained(training=training, folder=folder, data=data), OTHERS.get(training.data)
        if other is None or self.scale.data[other] == self.scale.data[training.data]:
            return trained
        try:
            place = find_data(self.scale.data[other], self.data_dirs, self.runs)
        except NotAtHand:
            return trained
        return replace(trained, other=place, other_title=f"test images of {self.scale.titles[other]}")

    def _train(self, training: Training, words: str, left: Sequence[Training]) -> None:
        """Unless it is trained, and recorded, already."""
        folder, source, done = self.runs / training.name, None, fingerprint(training.declared())
        if is_finished(training, folder) and self.store.read(self.store.training(training.name), done):
            return
        data = self._find_data(training)
        if training.of:
            cut = self.scale.of(training.of)[0]
            if not is_finished(cut, self.runs / cut.name):
                raise UserError(f"it is cut from {cut.name}, which is not trained yet")
            source = self._open(cut, data)
        self.say(f"{words}: training, about {training.minutes:.0f} minutes; {self.left(left)}")
        start = time.monotonic()
        with stopping("the same command goes on from there") as should_stop:
            about = training_ways.train(
                training,
                folder,
                data,
                source=source,
                say=lambda line: self.say(f"{words}: {line}; {self.left(left)}"),
                should_stop=should_stop,
            )
        self.spent.append((training.minutes, (time.monotonic() - start) / 60))
        self._record(training, about, done)

    def left(self, todo: Sequence[Training]) -> str:
        """Time to the end of everything, as declared and as it has turned out so far."""
        minutes = sum(training.minutes + measuring_minutes(training, self.scale) for training in todo)
        declared, actual = (sum(column) for column in zip(*self.spent, strict=True)) if self.spent else (1.0, 1.0)
        return f"about {minutes * actual / max(declared, 1e-9) / 60:.1f} hours left in all"

    def _record(self, training: Training, about: JSON, done: str) -> None:
        declared = {**training.declared(), "data": self.scale.data[training.data]}
        result = {
            "training": training.name,
            "fingerprint": done,
            "declared": declared,
            "command": self._command(training),
        }
        estimated = {"seed": training.seed, "estimated_minutes": training.minutes}
        self.store.write(self.store.training(training.name), {**result, **estimated, **circumstances(), **about})

    def _command(self, training: Training) -> str:
        return f"python -m benchmarks.claims --scale {self.scale.name} --only {training.name}"

    def _measured(self, kind: str, training: Training) -> JSON | None:
        wanted = measurement_fingerprint(kind, training, self.scale)
        return self.store.read(self.store.measurement(kind, training.name), wanted)

    def _measure(self, kind: str, training: Training, words: str) -> None:
        result = self._open(training, "" if kind in NO_IMAGES else self._find_data(training))
        self.say(f"{words}: measuring {kind.replace('_', ' ')}")
        start = time.monotonic()
        found = KINDS[kind](result, self.scale)
        about = {
            "measurement": kind,
            "training": training.name,
            "fingerprint": measurement_fingerprint(kind, training, self.scale),
            "command": self._command(training),
            "seed": training.seed,
            "data": self.scale.data[training.data],
            **circumstances(),
            "minutes": (time.monotonic() - start) / 60,
            "n": found["n"],
            "found": found,
        }
        self.store.write(self.store.measurement(kind, training.name), about)


def without_places(words: str, places: Sequence[Path]) -> str:
    """A sentence for everybody: without the folders of this machine."""
    for place in sorted(
        {str(place) for place in places} | {str(place.resolve()) for place in places}, key=len, reverse=True
    ):
        words = words.replace(f"{place}/", "") if len(place) > 1 else words
    return words
