"""What is trained, at every scale: a declaration for each run. `python -m benchmarks.claims --list` prints them.

Claims name roles, such as `cifar10_sampled`; a scale says which trainings play them. `cpu` is for two cores and at
most ten hours in all: small lattices with a stem of stride 2, CamVid in place of Cityscapes. `full` is the paper's
own scale. `smoke` is a test of everything here on a few hundred embedded images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.claims.store import JSON

ScaleName = Literal["smoke", "cpu", "full"]
How = Literal["mixture", "peer", "slim", "given"]

SAMPLED = {"gates": "relaxed"}
EXPECTATION = {"gates": "expectation"}
SINGLE = {"exits": "last"}
SUM = {"mixing": "sum"}
MEASURING = {
    "curves": 2.5,
    "orders": 3,
    "monte_carlo": 6,
    "early_exit": 1,
    "uncertainty": 1.5,
    "wall_time": 2,
    "pictures": 1,
}
"""Estimated minutes of two cores at the scale `cpu`, for `cnmm_b4s3`."""
TWICE = (0, 1)
"""Two seeds, where a verdict depends on it."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training, or a model that the repository has already."""

    role: str
    data: str
    """cifar10, cifar100 or scenes; a scale says what stands for it."""
    how: How = "mixture"
    """mixture: `cnmm.train`; peer: `peers.train`; slim: what cutting leaves of another run, trained from scratch;
    given: a trained model of the repository."""
    network: str
    """Of the zoo, of the peers, or a name among the trained models."""
    recipe: str = "quick"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the recipe and of the model."""
    seed: int = 0
    minutes: float
    """Estimated, of two cores."""
    priority: int = 2
    """What is trained first: 1 decides several claims, 3 is beyond the paper."""
    also: tuple[str, ...] = ()
    """Other roles that it plays."""
    of: str = ""
    share: float = 0.0
    """Of a slim architecture: the role that it is cut from, and the share of its macs."""

    @property
    def name(self) -> str:
        return self.role if self.how == "given" else f"{self.role}_{self.seed}"

    @property
    def roles(self) -> tuple[str, ...]:
        return (self.role, *self.also)

    def declared(self) -> JSON:
        """All that its result depends on."""
        left_out = ("minutes", "priority", "also")
        about = {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}
        return {**about, "fields": dict(self.fields)}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Data, trainings, and how much is measured."""

    name: ScaleName
    data: Mapping[str, str]
    """By what claims call it: the kind and the usual name of its folder, KIND:FOLDER."""
    titles: Mapping[str, str]
    """What the page calls it."""
    trainings: tuple[Training, ...]
    points: int
    """Of the curves of a mixture, all exits together, about."""
    measuring: float
    """What measuring takes, relative to `MEASURING`."""
    images: int
    """Test images, at most."""
    samples: tuple[int, ...]
    """Of the mixture, for Monte-Carlo."""
    rounds: int
    """Of timing."""
    resamples: int = 1000

    def of(self, role: str) -> tuple[Training, ...]:
        """The trainings that play a role, by seed."""
        return tuple(each for each in self.trainings if role in each.roles)

    def ordered(self) -> list[Training]:
        """The most important first; what is cut from a run comes after it."""
        return sorted(self.trainings, key=lambda each: (each.how == "slim", each.priority))

    @property
    def minutes(self) -> float:
        return sum(each.minutes for each in self.trainings)


def seeds(training: Training, *numbers: int) -> Iterator[Training]:
    return (dataclasses.replace(training, seed=number) for number in numbers)


def _given() -> Iterator[Training]:
    """Models of the repository: used, not trained again."""
    for role, data, network in (
        ("cifar10_given", "cifar10", "cnmm_b6s3.cifar10"),
        ("cifar10_given_sgd", "cifar10", "cnmm_b4s3.cifar10"),
        ("fashion_given", "fashion", "cnmm_grey.fashion"),
        ("scenes_given", "scenes", "cnmm_seg_b5s5.camvid"),
    ):
        yield Training(role=role, data=data, how="given", network=network, recipe="", minutes=0, priority=0)


def _cpu() -> Iterator[Training]:
    """Sampled, expectation and sum are the paper's optimisation at shortened epochs; quick and street are ours."""
    yield from _given()
    b4 = "cnmm_b4s3"
    paper: dict[str, Any] = {"epochs": 14, "precision": "auto"}
    for data, ways in (
        ("cifar10", {"sampled": SAMPLED, "sampled_single": SAMPLED | SINGLE}),
        ("cifar100", {"sampled": SAMPLED, "sampled_single": SAMPLED | SINGLE, "expectation": EXPECTATION, "sum": SUM}),
    ):
        for way, fields in ways.items():
            run = Training(
                role=f"{data}_{way}",
                data=data,
                network=b4,
                recipe=data,
                fields=paper | fields,
                minutes=16.5,
                priority=1,
            )
            yield from seeds(run, *TWICE)
    quick = Training(role="cifar10_quick", data="cifar10", network=b4, fields={"epochs": 14}, minutes=17, priority=1)
    yield from seeds(quick, *TWICE)
    bare = {"epochs": 14, "ladder_start": 1.0, "exit_distill": 0.0}
    yield dataclasses.replace(quick, role="cifar10_untuned", fields=bare, minutes=14, priority=2)
    yield dataclasses.replace(quick, role="cifar100_quick", data="cifar100", priority=2)
    narrow: dict[str, Any] = {"stem_stride": 2, "channels": 32, "epochs": 6}
    for blocks, minutes in ((6, 9), (12, 23)):
        network = f"cnmm_b{blocks}s3"
        yield dataclasses.replace(
            quick, role=f"cifar10_b{blocks}", network=network, fields=narrow, minutes=minutes, priority=3
        )
    for part, share in (("half", 0.5), ("quarter", 0.25)):
        yield dataclasses.replace(
            quick, role=f"cifar10_slim_{part}", how="slim", of="cifar10_quick", share=share, minutes=9, priority=3
        )
    peer = Training(
        role="cifar10_msdnet", data="cifar10", how="peer", network="msdnet_lin5_s2", recipe="ours", minutes=16.5
    )
    for training in (peer, dataclasses.replace(peer, role="cifar10_slimmable", network="slimmable_12m", priority=3)):
        timed = dataclasses.replace(training, fields={"minutes": 16.0})
        yield from seeds(timed, *(TWICE if training is peer else (0,)))
    for size in ("12m", "6m", "3m"):
        fields = {"minutes": 16.0}
        yield dataclasses.replace(
            peer, role=f"cifar10_plain_{size}", network=f"plain_{size}", recipe="own", fields=fields, priority=3
        )
    small: dict[str, Any] = {"blocks": 3, "scales": 4, "channels": 32, "stem_stride": 4}
    crops = {"recipe": "street", "fields": {"epochs": 40, "final_epochs": 10, **small}}
    scenes = Training(role="scenes_sampled", data="scenes", network="cnmm_seg_b5s5", minutes=20, priority=1, **crops)
    slower = {"gates": "relaxed", "group": 1, "ladder_start": 1.0, "exit_distill": 0.0, "exits_per_step": None}
    for role, fields in (("scenes_sampled", slower), ("scenes_sampled_single", slower | SINGLE), ("scenes_street", {})):
        yield dataclasses.replace(scenes, role=role, fields={**scenes.fields, **fields})
    yield dataclasses.replace(
        peer, role="scenes_espnetv2", data="scenes", network="espnetv2_s1", fields={"minutes": 17.0}, minutes=20
    )


def _full() -> Iterator[Training]:
    """The paper's own scale: its lattices, its recipes, its epochs; peers by their authors' recipes."""
    yield from _given()
    hours = 60.0
    for data in ("cifar10", "cifar100"):
        b6, b12 = "cnmm_b6s3", "cnmm_b12s3"
        run = Training(role=f"{data}_sampled", data=data, network=b6, recipe=data, minutes=40 * hours, priority=1)
        yield from seeds(dataclasses.replace(run, also=(f"{data}_b6",)), *TWICE)
        yield from seeds(dataclasses.replace(run, role=f"{data}_sampled_single", fields=SINGLE), *TWICE)
        yield dataclasses.replace(run, role=f"{data}_b12", network=b12, minutes=150 * hours, priority=2)
        yield from seeds(dataclasses.replace(run, role=f"{data}_quick", recipe="long", minutes=6 * hours), *TWICE)
        peer = Training(
            role=f"{data}_msdnet", data=data, how="peer", network="msdnet_even10", recipe="own", minutes=40 * hours
        )
        yield from seeds(peer, *TWICE)
    ablation = Training(
        role="", data="cifar100", network="cnmm_b6s3", recipe="cifar100", minutes=36 * hours, priority=1
    )
    for way, fields in (("expectation", EXPECTATION), ("sum", SUM)):
        yield from seeds(dataclasses.replace(ablation, role=f"cifar100_{way}", fields=fields), *TWICE)
    quick = Training(role="", data="cifar10", network="cnmm_b6s3", recipe="long", minutes=6 * hours)
    bare = {"ladder_start": 1.0, "exit_distill": 0.0}
    yield dataclasses.replace(quick, role="cifar10_untuned", fields=bare, priority=3)
    for part, share in (("half", 0.5), ("quarter", 0.25)):
        yield dataclasses.replace(
            quick, role=f"cifar10_slim_{part}", how="slim", of="cifar10_quick", share=share, priority=3
        )
    plain = Training(
        role="",
        data="cifar10",
        how="peer",
        network="",
        recipe="own",
        fields={"epochs": 200},
        minutes=6 * hours,
        priority=3,
    )
    for role, network in (("slimmable", "slimmable_12m"), ("plain_12m", "plain_118m"), ("plain_6m", "plain_33m")):
        yield dataclasses.replace(plain, role=f"cifar10_{role}", network=network)
    yield dataclasses.replace(plain, role="cifar10_plain_3m", network="plain_12m")
    scenes = Training(
        role="scenes_sampled",
        data="scenes",
        network="cnmm_seg_b5s5",
        recipe="cityscapes",
        minutes=200 * hours,
        priority=1,
    )
    yield scenes
    yield dataclasses.replace(scenes, role="scenes_sampled_single", fields=SINGLE)
    yield dataclasses.replace(scenes, role="scenes_street", recipe="street", minutes=60 * hours, priority=2)
    yield dataclasses.replace(
        peer, role="scenes_espnetv2", data="scenes", network="espnetv2_s1", fields={"epochs": 300}
    )


def _smoke() -> Iterator[Training]:
    """Every role once, for seconds: what is trained at the scale `cpu`, with the smallest networks."""
    tiny: dict[str, Any] = {"epochs": 1, "batch_size": 50, "val": 100}
    scene: dict[str, Any] = {"epochs": 1, "batch_size": 4, "val": 4, "scene_crop": (48, 64), "final_epochs": 0}
    for training in _cpu():
        if training.seed or training.how == "given":
            continue
        fields = {name: value for name, value in training.fields.items() if name in _KEPT}
        size = scene if training.data == "scenes" else tiny
        if training.how == "peer":
            fields, network = {"epochs": 1, "val": size["val"]}, training.network
            network = network.replace("_12m", "_3m") if network.startswith("plain") else network
        else:
            network = "cnmm_seg_tiny" if training.data == "scenes" else "cnmm_tiny"
        two = TWICE if training.role == "cifar10_sampled" else (0,)
        minutes = 0.05
        also = _STANDS_FOR.get(training.role, ())
        smallest = dataclasses.replace(training, network=network, fields={**size, **fields}, minutes=minutes, also=also)
        yield from seeds(smallest, *two)
    yield Training(role="fashion_given", data="fashion", how="given", network="cnmm_grey.fashion", recipe="", minutes=0)


_KEPT = ("gates", "group", "exits", "mixing", "ladder_start", "exit_distill", "exits_per_step")
"""What makes a variant of a training."""

_STANDS_FOR = {"cifar10_quick": ("cifar10_given", "cifar10_given_sgd"), "scenes_street": ("scenes_given",)}
"""At the scale `smoke`: runs that stand for models of the repository."""

_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion": "Fashion-MNIST"}
SCALES: dict[str, Scale] = {
    "smoke": Scale(
        name="smoke",
        data={
            "cifar10": "claims_sample",
            "cifar100": "claims_sample",
            "fashion": "claims_sample",
            "scenes": "masks:scenes",
        },
        titles={"cifar10": "sample", "cifar100": "sample again", "fashion": "sample", "scenes": "made-up scenes"},
        trainings=tuple(_smoke()),
        points=8,
        measuring=0.005,
        images=200,
        samples=(1, 2),
        rounds=1,
        resamples=100,
    ),
    "cpu": Scale(
        name="cpu",
        data={
            "cifar10": "cifar10:cifar-10-batches-py",
            "cifar100": "cifar100:cifar-100-python",
            "fashion": "fashion:fashion-mnist",
            "scenes": "camvid:camvid",
        },
        titles=_TITLES | {"scenes": "CamVid"},
        trainings=tuple(_cpu()),
        points=32,
        measuring=1.0,
        images=10_000,
        samples=(1, 5, 15, 30),
        rounds=7,
    ),
    "full": Scale(
        name="full",
        data={
            "cifar10": "cifar10:cifar-10-batches-py",
            "cifar100": "cifar100:cifar-100-python",
            "fashion": "fashion:fashion-mnist",
            "scenes": "cityscapes:cityscapes",
        },
        titles=_TITLES | {"scenes": "Cityscapes"},
        trainings=tuple(_full()),
        points=96,
        measuring=10.0,
        images=10_000,
        samples=(1, 5, 15, 30),
        rounds=7,
    ),
}
