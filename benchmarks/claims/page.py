"""docs/claims.md, from the JSON files alone: the same files give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import figures
from benchmarks.claims.beyond import BEYOND, CONTROLS
from benchmarks.claims.claim import NOT_RUN, Claim, Judged, judge, overall
from benchmarks.claims.claims import CLAIMS, SHOWN, STATEMENTS
from benchmarks.claims.runner import SKIPPED, measurement_fingerprint, needed_kinds, training_fingerprint
from benchmarks.claims.store import JSON, Store
from benchmarks.claims.trainings import MEASURING, Scale, Training
from benchmarks.claims.verdict import FAILS, HOLDS, UNKNOWN
from cnmm._errors import UserError
from cnmm._files import write_atomically

PREFIX = "claims_"
"""Of the pictures' names."""
INTRO = {
    "cpu": "This is the scale `cpu`: small lattices with a stem of stride 2, about twenty minutes each on two cores, "
    "CamVid in place of Cityscapes, and the models that the repository has. The paper trains for 300 epochs; here it "
    "is {epochs}. What needs the paper's own scale cannot be judged here, and the page says so. `SCALE=full` is for "
    "whoever has the hardware.",
    "full": "This is the scale `full`: the paper's own lattices, recipes and epochs.",
    "smoke": "This is the scale `smoke`: seconds of training on a few hundred images. It shows that everything runs; "
    "its verdicts mean nothing.",
}


class Results:
    """What is there, of what was declared as it is declared now."""

    def __init__(self, scale: Scale, store: Store) -> None:
        self.scale, self.store = scale, store
        self.skipped: JSON = (store.read(store.folder / SKIPPED) or {}).get("why", {})

    def training(self, training: Training) -> JSON | None:
        try:
            return self.store.read(self.store.training(training.name), training_fingerprint(training))
        except UserError:  # a given model that is not given yet
            return None

    def measurement(self, kind: str, training: Training) -> JSON | None:
        try:
            wanted = measurement_fingerprint(kind, training, self.scale)
        except UserError:
            return None
        return self.store.read(self.store.measurement(kind, training.name), wanted)

    def find(self, kind: str, role: str) -> tuple[list[JSON], str]:
        """The measurements of a role by seed, and why there are none."""
        trainings = self.scale.of(role)
        found = [self.measurement(kind, each) for each in trainings]
        there = [each for each in found if each is not None]
        return there, "" if there else "; ".join(dict.fromkeys(self.why(kind, each) for each in trainings))

    def why(self, kind: str, training: Training) -> str:
        """Why something was not run."""
        for name in (f"{kind}.{training.name}", training.name):
            if name in self.skipped:
                return str(self.skipped[name])
        if self.training(training) is not None:
            return "it was not measured yet"
        return "the repository has no such model yet" if training.how == "given" else "it was not trained yet"


def write_page(scale: Scale, store: Store, page: Path) -> None:
    """The page and its pictures, in a folder `images` beside it."""
    results = Results(scale, store)
    pictures = figures.draw_all(scale, results.find)
    folder = page.parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    prefix = PREFIX if scale.name == "cpu" else f"{PREFIX}{scale.name}_"
    for name, data in pictures.items():
        write_atomically(folder / f"{prefix}{name}", data)
    for old in folder.glob(f"{prefix}*"):
        if old.name.removeprefix(prefix) not in pictures and not any(
            scale.name == "cpu" and old.name.startswith(f"{PREFIX}{other}_") for other in ("full", "smoke")
        ):
            old.unlink()
    write_atomically(page, render(scale, store, [f"{prefix}{name}" for name in pictures]).encode())


def render(scale: Scale, store: Store, pictures: Sequence[str]) -> str:
    """The page, with those pictures that there are."""
    results = Results(scale, store)
    judged = {claim.key: judge(claim, results.find, scale.name) for claim in CLAIMS}
    parts = [
        f"# The paper's claims, checked\n\n{_opening(scale)}",
        _summary(judged),
        _shown(judged),
        "## The paper's statements\n",
        *(_claim(claim, judged[claim.key], scale, pictures) for claim in STATEMENTS),
        "## Controls\n\nWhat a reviewer would ask.\n",
        *(_claim(claim, judged[claim.key], scale, pictures) for claim in CONTROLS),
        "## Beyond the paper\n\nWhat this package adds, judged in the same way.\n",
        *(_claim(claim, judged[claim.key], scale, pictures) for claim in BEYOND),
        _hours(results),
        _missing(results),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


OPENING = """A. Ruiz and J. Verbeek, *Adaptative Inference Cost With Convolutional Neural Mixture Models*, ICCV 2019.
Every statement of its experiments, what we measure, and a verdict. This page is generated: do not edit it.

    make paper SCALE={scale} DATA=DIR                          # trains and measures what is missing; renders this page
    python -m benchmarks.claims --scale {scale} --list         # what is trained, for how long, and what is there

{intro}

How to read it:

- **{holds}**, **{fails}** or **{unknown}**: by the rule that stands with each claim
  ([benchmarks/claims](../benchmarks/claims)), written before what is trained here, but after the models of the
  repository, which some cases are judged on. Where an interval decides nothing, nothing is decided.
  **{not_run}**: and why.
- *sampled*, *expectation* and *sum* are the paper's optimisation with its relaxed samples, with expectations, and with
  the deterministic sum. *quick* and *street* are our recipes; sampled {scenes} has the optimisation of `street`. Where
  cases trained in the paper's way were run, they decide, and ours stand beside them. One deciding case that does not
  hold refutes a claim; it holds if at least half of them do.
- Operating points are chosen on held-out images; figures are of test images. Where only held-out images have them
  (models of the repository, points that are not their best), the column n says so.
- Differences are in points of accuracy or mIoU, with their 95 % interval: image by image where both sides have answers
  (McNemar's test, two-sided; a bootstrap over scenes for mIoU), else of two independent shares. With two seeds it is
  that of their mean, and never narrower than the seeds are apart.
- A mac is a multiply-add, which the paper counts as a FLOP ([how we count](paper-map.md)).
"""


def _opening(scale: Scale) -> str:
    words = {"holds": HOLDS, "fails": FAILS, "unknown": UNKNOWN, "not_run": NOT_RUN}
    epochs = {each.fields.get("epochs") for each in scale.of("cifar10_sampled")}
    intro = INTRO[scale.name].format(epochs=", ".join(map(str, sorted(epochs, key=str))))
    return OPENING.format(scale=scale.name, intro=intro, scenes=scale.titles["scenes"], **words)


def _summary(judged: dict[str, list[Judged]]) -> str:
    lines = ["## All verdicts", "", "| | claim | verdict | |", "|---|---|---|---|"]
    for claim in CLAIMS:
        verdict = overall(judged[claim.key])
        lines.append(f"| {claim.key} | [{claim.title}](#{_anchor(claim)}) | **{verdict.word}** | {verdict.reason} |")
    words = [overall(cases).word for cases in judged.values()]
    counts = "; ".join(f"{word}: {words.count(word)}" for word in (HOLDS, FAILS, UNKNOWN, NOT_RUN))
    return "\n".join([*lines, "", f"{len(words)} claims. {counts}.", ""])


def _shown(judged: dict[str, list[Judged]]) -> str:
    """The paper's table and figures, by the claims that are read off them."""
    lines = ["## The paper's table and figures", "", "| in the paper | verdict | claims |", "|---|---|---|"]
    for what, keys in SHOWN.items():
        words = {key: overall(judged[key]).word for key in keys}
        found = list(words.values())
        all_run = HOLDS if set(found) <= {HOLDS} else UNKNOWN
        word = FAILS if FAILS in found else NOT_RUN if set(found) == {NOT_RUN} else all_run
        parts = [f"{word}: {', '.join(key for key in keys if words[key] == word)}" for word in dict.fromkeys(found)]
        lines.append(f"| {what} | **{word}** | {'; '.join(parts)} |")
    return "\n".join([*lines, "", "Figures 1 to 5 explain the method and claim nothing.", ""])


def _heading(claim: Claim) -> str:
    return f"{claim.key}. {claim.title}"


def _anchor(claim: Claim) -> str:
    """As GitHub makes it of the heading."""
    text = _heading(claim).lower()
    return "".join("-" if char == " " else char for char in text if char.isalnum() or char in " -_")


def _claim(claim: Claim, cases: list[Judged], scale: Scale, pictures: Sequence[str]) -> str:
    titles, verdict = scale.titles, overall(cases)
    lines = [f"### {_heading(claim)}", "", f"{claim.where}: {claim.paper}", "", f"*Rule:* {claim.rule_words}.", ""]
    lines += [f"**{verdict.word}**" + (f" ({verdict.reason})" if verdict.reason else "") + ".", ""]
    ran = [each for each in cases if each.found is not None]
    if ran:
        lines += ["| case | verdict | found | n | runs |", "|---|---|---|---|---|"]
        lines += [*(_case(each, scale) for each in ran), ""]
    for each in ran if claim.table else []:
        lines += _table(claim, each, titles)
    lines += _not_run([each for each in cases if each.found is None], titles)
    roles = dict.fromkeys(need.partition(":")[2] for each in cases for need in each.case.needs.values())
    lines += [f"*Again:* `python -m benchmarks.claims --scale {scale.name} --only {' '.join(roles)}`", ""]
    shown = [name for name in pictures if claim.picture and f"_{claim.picture}" in name]
    return "\n".join([*lines, *(f"![{_words(name)}](images/{name})" for name in shown), ""])


def _words(picture: str) -> str:
    return Path(picture).stem.removeprefix(PREFIX).replace("_", " ")


def _case(each: Judged, scale: Scale) -> str:
    assert each.found is not None
    images = " ".join([f"{each.found['n']:,}", " and ".join(sorted(_splits(each.found)))]).strip()
    runs = ", ".join(f"`{run}`" for run in each.runs)
    label = each.case.label.format_map(scale.titles)
    return f"| {label} | {each.verdict.word} | {each.verdict.reason} | {images} | {runs} |"


def _splits(found: Any) -> set[str]:
    """The images that figures are of, wherever they say so."""
    if isinstance(found, dict):
        own = {found["split"]} if isinstance(found.get("split"), str) else set()
        return own.union(*(_splits(each) for each in found.values()))
    return set().union(*(_splits(each) for each in found)) if isinstance(found, list) else set()


def _table(claim: Claim, each: Judged, titles: Mapping[str, str]) -> list[str]:
    assert claim.table is not None
    assert each.found is not None
    head, rows = claim.table(each.found)
    lines = [f"{each.case.label.format_map(titles)}:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""] if rows else []


def _not_run(cases: Sequence[Judged], titles: Mapping[str, str]) -> list[str]:
    """By reason: which cases were not run."""
    by_reason: dict[str, list[str]] = {}
    for each in cases:
        by_reason.setdefault(each.verdict.reason, []).append(each.case.label.format_map(titles))
    lines = [f"- Not run, because {reason}: {'; '.join(labels)}." for reason, labels in by_reason.items()]
    return [*lines, ""] if lines else []


def _hours(results: Results) -> str:
    """Training time, run by run."""
    lines = [
        "## Hours",
        "",
        "| run | network | data | seed | minutes | CPU minutes | hardware | command |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total, lists = 0.0, 0
    for training in results.scale.ordered():
        found = results.training(training)
        if found is None or training.how == "given":
            continue
        lists += 1
        total += found["minutes"]
        hardware = f"{found['hardware']['cpu']}, {found['hardware']['threads']} threads"
        cells = [
            f"`{training.name}`",
            training.network,
            found["declared"]["data"].partition(":")[0],
            str(training.seed),
        ]
        cells += [f"{found['minutes']:.1f}", f"{found['cpu_minutes']:.1f}", hardware, f"`{found['command']}`"]
        lines.append(f"| {' | '.join(cells)} |")
    if not lists:
        return "## Hours\n\nNothing was trained for this page yet. " + _given(results)
    return "\n".join([*lines, "", f"{total / 60:.1f} hours in all, measuring not counted. {_given(results)}"])


def _given(results: Results) -> str:
    names = [each.network for each in results.scale.trainings if each.how == "given" and results.training(each)]
    return (
        f"Trained models that the repository has are used as they are: {', '.join(f'`{name}`' for name in names)}.\n"
        if names
        else "\n"
    )


def _missing(results: Results) -> str:
    """What was not run, and why."""
    lines = ["## Not run", ""]
    kinds = needed_kinds(results.scale)
    rows = []
    for training in results.scale.ordered():
        if results.training(training) is None:
            rows.append((f"`{training.name}`", f"{training.minutes:.1f}", results.why("", training)))
            continue
        for kind in kinds[training.name]:
            if results.measurement(kind, training) is None:
                what = f"{kind.replace('_', ' ')} of `{training.name}`"
                minutes = training.weight * results.scale.measuring * MEASURING.get(kind, 0.0)
                rows.append((what, f"{minutes:.1f}", results.why(kind, training)))
    if not rows:
        return "\n".join([*lines, "Everything was run.", ""])
    lines += ["| what | estimated minutes | why |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {minutes} | {why} |" for name, minutes, why in rows), ""])
