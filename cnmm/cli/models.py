"""The verbs about models that need no training and no torch: `models`, `info` and `draw`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from cnmm._errors import UserError
from cnmm.cli.flags import Flags, model_flags
from cnmm.cli.terminal import NO_HINT, Common, print_table, say, write
from cnmm.cost import CostTable, short_count
from cnmm.draw import check_suffix, draw_lattice, save_picture
from cnmm.lattice import OperatingPoint
from cnmm.plan import Plan, require_torch
from cnmm.pretrained import list_pretrained, resolve
from cnmm.prune import named_point
from cnmm.run_folder import CONFIG_FILE, is_run, load_plan
from cnmm.zoo import describe_model, list_models, model_plan, num_networks, summary

ModelFlags = Annotated[Flags, arg(constructor_factory=model_flags)]
ModelName = Annotated[Positional[str], arg(metavar="MODEL|RUN", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Models:
    """List the models of the zoo."""

    pattern: Annotated[Positional[str], arg(metavar="[PATTERN]", help_behavior_hint="(default: all)")] = ""
    """Show only names that contain this text."""
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        names = list_models(self.pattern)
        if not names:
            raise UserError(f"no model's name contains {self.pattern!r}; the zoo has {', '.join(list_models())}")
        models = [summary(model_plan(name)) | {"description": describe_model(name)} for name in names]
        return {"models": models, "trained": [name for name in list_pretrained() if self.pattern in name]}

    def show(self, answer: dict[str, Any]) -> None:
        columns = ("model", "maps", "edges", "networks", "macs", "params", "input", "description")
        rows = []
        for row in answer["models"]:
            counts = f"{row['networks']:,}", short_count(row["macs"]), short_count(row["params"])
            rows.append((row["model"], row["maps"], row["edges"], *counts, shape_text(row), row["description"]))
        print_table(columns, rows, left=("model", "description"))
        say("edges include the stem and the edges into the output; macs are for one image")
        if answer["trained"]:
            say(f"trained models at hand, usable in place of a run folder: {', '.join(answer['trained'])}")


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show maps, edges, networks, macs and params of a model and of each exit."""

    model: ModelName
    """Name of a zoo model, a run folder, or a trained model such as cnmm_b6s3.cifar10."""
    learning: Annotated[bool, NO_HINT] = False
    """Show what a run has learned: share of every block, how far gates moved, gradients (needs torch)."""
    overrides: ModelFlags
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        given = self.overrides.given()
        plan, run = find_model(self.model, given)
        learning = {"learning": learned(self.model, run)} if self.learning else {}
        plan = resize(plan, given.get("input_size"))
        table = CostTable.of(plan.config)
        exits = [
            {"exit": exit, **dataclasses.asdict(table.exit(exit)), "networks": num_networks(plan, exit)}
            for exit in plan.config.exit_numbers
        ]
        return summary(plan) | ({"run": str(run)} if run else {}) | {"exits": exits} | learning

    def show(self, answer: dict[str, Any]) -> None:
        output = answer["edges"] - answer["block_edges"] - 1
        write(answer["model"] + (f" (run folder {answer['run']})" if "run" in answer else ""))
        write(f"  task      {answer['task']}, {answer['num_classes']} classes, images of {shape_text(answer)}")
        write(f"  maps      {answer['maps']} = {answer['blocks']} blocks x {answer['scales']} scales")
        edges = f"{answer['block_edges']} between maps + 1 stem + {output} into the output"
        write(f"  edges     {answer['edges']} = {edges}")
        for name in ("networks", "macs", "params"):
            write(f"  {name:8}  {answer[name]:,}")
        rows = []
        for row in answer["exits"]:
            share = f"{row['macs'] / answer['macs']:.1%}"
            rows.append((row["exit"], f"{row['networks']:,}", f"{row['macs']:,}", share, f"{row['params']:,}"))
        write()
        print_table(("exit", "networks", "macs", "of full", "params"), rows)
        if "learning" in answer:
            write()
            show_learning(answer["learning"])


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Draw a model, or one of its operating points: edge width shows how many networks use the edge."""

    model: ModelName
    """Name of a zoo model, a run folder, or a trained model such as cnmm_b6s3.cifar10."""
    out: Annotated[Path, arg(aliases=["-o"], metavar="FILE")]
    """The picture to write: .svg or .png."""
    point: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: nothing cut)")] = None
    """An operating point such as e5c37: exit 5, 37 cuts."""
    overrides: ModelFlags
    common: Common = Common()

    def answer(self) -> dict[str, Any]:
        check_suffix(self.out)
        given = self.overrides.given()
        plan, _ = find_model(self.model, given)
        point = None if self.point is None else find_point(plan, self.point)
        plan = resize(plan, given.get("input_size"))
        save_picture(draw_lattice(plan, point), self.out)
        table = CostTable.of(plan.config)
        return {
            "file": str(self.out),
            "model": plan.config.name,
            "point": point.name if point else f"e{plan.config.blocks}c0",
            "macs": (table.point(point) if point else table.exit()).macs,
        }

    def show(self, answer: dict[str, Any]) -> None:
        write(answer["file"])


def learned(name: str, run: Path | None) -> dict[str, Any]:
    """What a run has learned, as `--json` prints it."""
    if run is None:
        raise UserError(f"--learning: {name} is a model of the zoo, and only a run has learned something")
    require_torch()
    from cnmm.evaluation.learning import learning_report

    return learning_report(run).to_dict()


def show_learning(learning: dict[str, Any]) -> None:
    """A table by block, and what became of gates and cutting orders."""
    gradients = learning["gradients"] or {}
    rows = [
        (
            row["block"],
            sum(matrix["block"] == row["block"] for matrix in learning["matrices"]),
            f"{row['mean']:.2f}",
            f"{row['least']:.2f}",
            f"{gradients[str(row['block'])]:.3g}" if str(row["block"]) in gradients else "",
        )
        for row in learning["blocks"]
    ]
    print_table(("block", "matrices", "learned share", "least", "gradient norm"), rows)
    write(f"gates moved by {learning['gates_mean']:.3f} on average, {learning['gates_max']:.3f} at most")
    for order in learning["orders"]:
        words = f"{order['common']} of the {order['kept']} edges left are those of the untrained order"
        write(f"exit {order['exit']} after {order['cuts']} cuts by {order['rule']}: {words}")
    say(f"learned share: how far a matrix turned away from where it began, computed from its {learning['method']}")


def find_model(name: str, given: dict[str, Any]) -> tuple[Plan, Path | None]:
    """The plan of a zoo model, or that of a run folder with its trained gates, and the folder."""
    path, zoo = Path(name), list_models()
    if is_run(path):
        for field in sorted(given.keys() - {"input_size"}):
            flag = "--" + field.replace("_", "-")
            raise UserError(f"{flag} {given[field]}: {name} is a run folder, and its model is fixed; remove {flag}")
        if name in zoo:
            say(f"{name} is both a run folder and a zoo model; using the run folder")
        return load_plan(path), resolve(path)
    if name not in zoo and path.exists():
        raise UserError(f"{name}: not a run folder ({CONFIG_FILE} missing); `cnmm models` lists the models of the zoo")
    if name not in zoo and len(path.parts) > 1:
        raise UserError(f"{name}: no such run folder; `cnmm models` lists the models of the zoo")
    return model_plan(name, **given), None


def find_point(plan: Plan, name: str) -> OperatingPoint:
    """An operating point by name; the deterministic variant has full exits only."""
    point = named_point(plan, name)
    full = f"e{point.exit}c0"
    if plan.config.mixing == "sum" and name != full:
        raise UserError(f"point {name!r}: a model with mixing='sum' cannot be cut; use the full exit, {full}")
    return point


def resize(plan: Plan, input_size: tuple[int, int] | None) -> Plan:
    """The same model and gates where macs refer to another input size."""
    if input_size is None:
        return plan
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, input_size=input_size))


def shape_text(row: dict[str, Any]) -> str:
    height, width = row["input_size"]
    return f"{row['in_chans']}x{height}x{width}"
