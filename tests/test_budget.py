import pytest
from hypothesis import given
from hypothesis import strategies as st

from cnmm.budget import Budget, parse_budget, prefix_of


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("60M", "macs", 60e6),
        ("60m", "macs", 60e6),
        ("1.5G", "macs", 1.5e9),
        ("800k", "macs", 800e3),
        ("60000000", "macs", 60e6),
        ("60,000,000", "macs", 60e6),
        ("1,200,000", "macs", 1.2e6),
        ("1_200_000", "macs", 1.2e6),
        ("95.36M", "macs", 95_360_000),
        (".5 M", "macs", 500e3),
        (12_000_000, "macs", 12e6),
        (1.5e6, "macs", 1.5e6),
        ("25ms", "ms", 25),
        ("2.5 ms", "ms", 2.5),
        ("40%", "percent", 40),
        (" 12.5% ", "percent", 12.5),
        ("acc:0.92", "quality", 0.92),
        ("miou:.55", "quality", 0.55),
        ("acc:1", "quality", 1),
        ("acc:0", "quality", 0),
        ("mca:0.9", "quality", 0.9),
    ],
)
def test_forms(text, kind, value):
    budget = parse_budget(text)
    assert (budget.kind, budget.value) == (kind, value)
    assert parse_budget(budget) is budget


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M",
        "60MB",
        "60 macs",
        "-60M",
        "ms",
        "25s",
        "%",
        "acc",
        "acc:",
        "acc:92%",
        "fast",
        "1e6M",
        "6 0M",
        "٣M",
        "nan",
        "1,2M",
        "1,2",
        "12,00,000",
        "1,200,00",
        "0,92",
        "acc:0,92",
        "top5:0.9",
    ],
)
def test_anything_else_is_refused_with_the_allowed_forms(text):
    with pytest.raises(ValueError, match=r"60M.*25ms.*40%.*acc:0.92") as error:
        parse_budget(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "metric"),
    [("acc:0.9", "accuracy"), ("mca:0.9", "mean_class_accuracy"), ("MIOU:0.9", "miou"), ("9M", None)],
)
def test_a_prefix_names_the_metric(text, metric):
    assert parse_budget(text).metric == metric
    assert metric is None or text.lower().startswith(f"{prefix_of(metric)}:")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, None, [60]])
def test_numbers_are_positive(value):
    with pytest.raises(ValueError, match="budget"):
        parse_budget(value)


@pytest.mark.parametrize(
    ("text", "words"), [("acc:1.2", "between 0 and 1"), ("0M", "60M"), ("0ms", "60M"), ("0%", "60M")]
)
def test_values_out_of_range(text, words):
    with pytest.raises(ValueError, match=words):
        parse_budget(text)


@given(st.integers(1, 10**12))
def test_macs_are_exact(macs):
    assert parse_budget(str(macs)) == Budget(kind="macs", value=macs, text=str(macs))
    assert parse_budget(f"{macs / 1000:.3f}k").value == macs
