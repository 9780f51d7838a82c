"""What is trained, at every scale: a declaration for each run. `python -m benchmarks.claims --list` prints them.

Claims name roles, such as `cifar10_sampled`; a scale says which trainings play them. `cpu` is for two cores and at
most ten hours in all: small lattices with a stem of stride 2, CamVid in place of Cityscapes. `full` is the paper's
own scale. `smoke` is a test of everything here on a few hundred embedded images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
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
    "orders": 1.5,
    "monte_carlo": 6,
    "early_exit": 1,
    "uncertainty": 1.5,
    "wall_time": 0.25,
    "pictures": 0.5,
}
"""Estimated minutes of two cores at the scale `cpu`, for `cnmm_b4s3`."""
HOURS = 60.0
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
    weight: float = 1.0
    """What measuring it takes, relative to `cnmm_b4s3`: about its macs."""
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
        left_out = ("minutes", "priority", "weight", "also")
        about = {name: value for name, value in asdict(self).items() if name not in left_out}
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
    """Of the curves of a mixture by one rule, all exits together, about."""
    measuring: float
    """What measuring takes, relative to `MEASURING`."""
    images: int
    """Test images, at most."""
    samples: tuple[int, ...]
    """Of the mixture, for Monte-Carlo."""
    rounds: int
    """Of timing."""

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
    return (replace(training, seed=number) for number in numbers)


def _given() -> Iterator[Training]:
    """Models of the repository: used, not trained again."""
    for role, data, network in (
        ("cifar10_given", "cifar10", "cnmm_b6s3.cifar10"),
        ("cifar10_given_b4", "cifar10", "cnmm_b4s3.cifar10"),
        ("fashion_given", "fashion", "cnmm_grey.fashion"),
        ("scenes_given", "scenes", "cnmm_seg_b5s5.camvid"),
    ):
        weight = 8.0 if "b6s3" in network else 1.0
        model = Training(role=role, data=data, how="given", network=network, recipe="", minutes=0, priority=0)
        yield replace(model, weight=weight)


def _cpu() -> Iterator[Training]:
    for model in _given():  # one of them is the first seed of `quick`
        yield replace(model, also=("cifar10_quick",)) if model.role == "cifar10_given_b4" else model
    yield from _cpu_papers()
    yield from _cpu_ours(TWICE[1:])
    yield from _cpu_peers()
    yield from _cpu_scenes()


def _cpu_papers() -> Iterator[Training]:
    """The paper's optimisation, its samples and its variants, for 14 epochs instead of 300."""
    variants = {"sampled": SAMPLED, "sampled_single": SAMPLED | SINGLE}
    for data, more in (("cifar10", {}), ("cifar100", {"expectation": EXPECTATION, "sum": SUM})):
        for variant, fields in (variants | more).items():
            run = Training(
                role=f"{data}_{variant}",
                data=data,
                network="cnmm_b4s3",
                recipe=data,
                fields={"epochs": 14, "precision": "auto", **fields},
                minutes=16.5,
                priority=1,
            )
            yield from seeds(run, *TWICE)


def _cpu_ours(numbers: tuple[int, ...]) -> Iterator[Training]:
    """The recipe `quick`, what it is without ladder tuning, B = 6 and B = 12, and slim architectures from scratch."""
    usual = {"epochs": 14}
    quick = Training(role="cifar10_quick", data="cifar10", network="cnmm_b4s3", fields=usual, minutes=17, priority=1)
    yield from seeds(quick, *numbers)
    bare = {"ladder_start": 1.0, "exit_distill": 0.0}
    yield replace(quick, role="cifar10_untuned", fields=usual | bare, minutes=14, priority=2)
    yield replace(quick, role="cifar100_quick", data="cifar100", priority=2)
    narrow = replace(quick, fields={"epochs": 6, "stem_stride": 2, "channels": 32}, priority=3)
    yield replace(narrow, role="cifar10_b6", network="cnmm_b6s3", minutes=9)
    yield replace(narrow, role="cifar10_b12", network="cnmm_b12s3", minutes=23, weight=2.0)
    slim = replace(quick, how="slim", of="cifar10_quick", minutes=9, priority=3, weight=0.3)
    yield replace(slim, role="cifar10_slim_half", share=0.5)
    yield replace(slim, role="cifar10_slim_quarter", share=0.25)


def _cpu_peers() -> Iterator[Training]:
    """What one might use instead, each for as long as `quick`: 27 CPU minutes of one thread."""
    peer = Training(
        role="cifar10_msdnet",
        data="cifar10",
        how="peer",
        network="msdnet_lin5_s2",
        recipe="ours",
        fields={"minutes": 27.0},
        minutes=16,
    )
    yield from seeds(peer, *TWICE)
    yield replace(peer, role="cifar10_slimmable", network="slimmable_12m", priority=3)
    for size in ("12m", "6m", "3m"):
        yield replace(peer, role=f"cifar10_plain_{size}", network=f"plain_{size}", recipe="own", priority=3)


def _cpu_scenes() -> Iterator[Training]:
    """CamVid, a small lattice: the optimisation of `street`, with the paper's samples or as it is."""
    lattice = {"blocks": 3, "scales": 4, "channels": 32}
    street = Training(
        role="scenes_street",
        data="scenes",
        network="cnmm_seg_b5s5",
        recipe="street",
        fields={"epochs": 40, "final_epochs": 10, **lattice},
        minutes=20,
        priority=1,
        weight=2.0,
    )
    sampled = {"group": 1, "ladder_start": 1.0, "exit_distill": 0.0, "exits_per_step": None, **SAMPLED}
    yield replace(street, role="scenes_sampled", fields={**street.fields, **sampled})
    yield replace(street, role="scenes_sampled_single", fields={**street.fields, **sampled, **SINGLE})
    yield street
    yield Training(
        role="scenes_espnetv2",
        data="scenes",
        how="peer",
        network="espnetv2_s1",
        recipe="ours",
        fields={"minutes": 28.5},  # of one thread, as `street` takes
        minutes=19,
    )


def _full() -> Iterator[Training]:
    """The paper's own scale: its lattices, its recipes, its epochs; peers by their authors' recipes."""
    yield from _given()
    for data in ("cifar10", "cifar100"):
        run = Training(
            role=f"{data}_sampled",
            data=data,
            network="cnmm_b6s3",
            recipe=data,
            minutes=40 * HOURS,
            priority=1,
            weight=8.0,
        )
        yield from seeds(replace(run, also=(f"{data}_b6",)), *TWICE)
        yield from seeds(replace(run, role=f"{data}_sampled_single", fields=SINGLE), *TWICE)
        yield replace(run, role=f"{data}_b12", network="cnmm_b12s3", minutes=150 * HOURS, priority=2, weight=30.0)
        yield from seeds(replace(run, role=f"{data}_quick", recipe="long", minutes=6 * HOURS), *TWICE)
        peer = replace(run, role=f"{data}_msdnet", how="peer", network="msdnet_even10", recipe="own", priority=2)
        yield from seeds(peer, *TWICE)
        if data == "cifar100":
            yield from seeds(replace(run, role="cifar100_expectation", fields=EXPECTATION), *TWICE)
            yield from seeds(replace(run, role="cifar100_sum", fields=SUM), *TWICE)
    long = Training(
        role="cifar10_untuned",
        data="cifar10",
        network="cnmm_b6s3",
        recipe="long",
        minutes=6 * HOURS,
        priority=3,
        weight=8.0,
    )
    yield replace(long, fields={"ladder_start": 1.0, "exit_distill": 0.0})
    for part, share in (("half", 0.5), ("quarter", 0.25)):
        yield replace(long, role=f"cifar10_slim_{part}", how="slim", of="cifar10_quick", share=share)
    plain = replace(long, how="peer", recipe="own", fields={"epochs": 200})
    yield replace(plain, role="cifar10_slimmable", network="slimmable_12m")
    for size, network in (("12m", "plain_118m"), ("6m", "plain_33m"), ("3m", "plain_12m")):
        yield replace(plain, role=f"cifar10_plain_{size}", network=network)
    yield from _full_scenes()


def _full_scenes() -> Iterator[Training]:
    scenes = Training(
        role="scenes_sampled",
        data="scenes",
        network="cnmm_seg_b5s5",
        recipe="cityscapes",
        minutes=200 * HOURS,
        priority=1,
        weight=200.0,
    )
    yield scenes
    yield replace(scenes, role="scenes_sampled_single", fields=SINGLE)
    yield replace(scenes, role="scenes_street", recipe="street", minutes=60 * HOURS, priority=2)
    yield replace(
        scenes,
        role="scenes_espnetv2",
        how="peer",
        network="espnetv2_s1",
        recipe="own",
        fields={"epochs": 300},
        priority=2,
    )


def _smoke() -> Iterator[Training]:
    """Every role once, for seconds: what is trained at the scale `cpu`, with the smallest networks."""
    tiny: dict[str, Any] = {"epochs": 1, "batch_size": 50, "val": 100}
    scene: dict[str, Any] = {"epochs": 1, "batch_size": 4, "val": 4, "scene_crop": (48, 64), "final_epochs": 0}
    for training in (*_cpu_papers(), *_cpu_ours(TWICE), *_cpu_peers(), *_cpu_scenes()):
        if training.seed:
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
        smallest = replace(training, network=network, fields={**size, **fields}, minutes=minutes, also=also)
        yield from seeds(smallest, *two)
    yield Training(role="fashion_given", data="fashion", how="given", network="cnmm_grey.fashion", recipe="", minutes=0)


_KEPT = ("gates", "group", "exits", "mixing", "ladder_start", "exit_distill", "exits_per_step")
"""What makes a variant of a training."""

_STANDS_FOR = {"cifar10_quick": ("cifar10_given", "cifar10_given_b4"), "scenes_street": ("scenes_given",)}
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
        points=4,
        measuring=0.005,
        images=200,
        samples=(1, 2),
        rounds=1,
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
        measuring=2.0,
        images=10_000,
        samples=(1, 5, 15, 30),
        rounds=7,
    ),
}
