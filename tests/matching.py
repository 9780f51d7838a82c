"""Which tensor of the fast mixture is which of the reference's, so that both can be given the same parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cnmm.mixture import Mixture
from tests.reference import ReferenceMixture

Pair = tuple[str, Tensor, Tensor]


def reference_of(model: Mixture) -> ReferenceMixture:
    """The literal mixture with the same parameters and running statistics, in the same mode and precision."""
    reference = ReferenceMixture(model.config).to(next(model.parameters()).dtype)
    with torch.no_grad():
        for _, ours, theirs in [*parameter_pairs(model, reference), *statistics_pairs(model, reference)]:
            theirs.copy_(ours)
    return reference.train(model.training)


def gradient_pairs(model: Mixture, reference: ReferenceMixture) -> Iterator[Pair]:
    """(name, our gradient, the reference's), for every parameter but the gates."""
    for name, ours, theirs in parameter_pairs(model, reference, gradients=True):
        if theirs.grad is not None:
            yield name, ours, theirs.grad
        else:
            assert not ours.any(), f"{name} has a gradient but the reference does not use it"


def parameter_pairs(model: Mixture, reference: ReferenceMixture, *, gradients: bool = False) -> Iterator[Pair]:
    """(name, ours, the reference's parameter), in the reference's shapes; `gradients`: of ours, the gradient."""

    def of(parameter: Tensor | None) -> Tensor:
        assert parameter is not None
        if not gradients:
            return parameter
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def affine(name, ours, bn, act, pick=slice(None)):
        yield f"{name}.weight", of(ours.weight)[pick], bn.weight
        yield f"{name}.bias", of(ours.bias)[pick], bn.bias
        if ours.slope is not None:
            yield f"{name}.slope", of(ours.slope)[pick], act.weight

    def convolution_edge(name, mix, position, edge):
        start = sum(mix.widths[:position])
        span = slice(start, start + mix.widths[position])
        yield from affine(f"{name}.bn1", mix.affine, edge.bn1, edge.act, span)
        yield f"{name}.conv", of(mix.weight)[span].T[:, :, None, None], edge.conv.weight
        yield from affine(f"{name}.bn2", mix.out_affine, edge.bn2, None, position)

    yield "stem", of(model.stem), reference.stem_conv.weight
    for node, this in model.maps.items():
        for position, source in enumerate(this.sources):
            yield from convolution_edge(f"{source}_{node}", this.mix, position, reference.edge[f"{source}_{node}"])
        if this.shared is not None:
            shared = reference.shared[node]
            yield from affine(f"shared{node}", this.shared.affine, shared.bn, shared.act)
            yield f"shared{node}.depthwise", of(this.shared.depthwise), shared.depthwise.weight
            yield f"shared{node}.pointwise", of(this.shared.pointwise), shared.pointwise.weight
    for position, source, output, edge in _output_edges(model, reference):
        if model.config.task == "segmentation":
            yield from convolution_edge(f"{source}_T", output, position, edge)
        else:
            yield from affine(f"{source}_T.bn1", output.affine, edge.bn1, None, position)
            yield f"{source}_T.fc", of(output.weight)[position].T, edge.fc.weight
            yield from affine(f"{source}_T.bn2", output.out_affine, edge.bn2, None, position)
    for exit, classifier in model.classifiers.items():
        theirs = reference.classifier[exit]
        if model.config.task == "classification":
            yield f"theta{exit}.weight", of(classifier.weight), theirs.weight
            yield f"theta{exit}.bias", of(classifier.bias), theirs.bias
        else:
            yield from affine(f"theta{exit}.bn1", classifier.first, theirs.bn1, theirs.act1)
            yield f"theta{exit}.conv", of(classifier.conv), theirs.conv.weight
            yield from affine(f"theta{exit}.bn2", classifier.second, theirs.bn2, theirs.act2)
            yield f"theta{exit}.depthwise", of(classifier.depthwise), theirs.depthwise.weight
            yield f"theta{exit}.pointwise", of(classifier.pointwise), theirs.pointwise.weight
            yield f"theta{exit}.bias", of(classifier.bias), theirs.pointwise.bias


def statistics_pairs(model: Mixture, reference: ReferenceMixture) -> Iterator[Pair]:
    """(name, ours, the reference's running statistic); several of the reference's may share one of ours."""

    def both(name, ours, bn, pick=slice(None)):
        yield f"{name}.mean", ours.mean[pick], bn.running_mean
        yield f"{name}.var", ours.var[pick], bn.running_var

    lattice = model.lattice
    for node, this in model.maps.items():
        for position, source in enumerate(this.sources):
            edge = reference.edge[f"{source}_{node}"]
            if source == 0:
                before = model.stem_statistics
            elif lattice.falls((source, int(node))):
                before = model.maps[str(source)].pooled_statistics
            else:
                before = model.maps[str(source)].kept_statistics
            yield from both(f"{source}_{node}.bn1", before, edge.bn1)
            yield from both(f"{source}_{node}.bn2", this.mix.statistics, edge.bn2, position)
        if this.shared is not None:
            yield from both(f"shared{node}", this.statistics, reference.shared[node].bn)
    for position, source, output, edge in _output_edges(model, reference):
        this = model.maps[str(source)]
        before = this.kept_statistics if model.config.task == "segmentation" else this.statistics
        yield from both(f"{source}_T.bn1", before, edge.bn1)
        yield from both(f"{source}_T.bn2", output.statistics, edge.bn2, position)
    if model.config.task == "segmentation":
        for exit, classifier in model.classifiers.items():
            yield from both(f"theta{exit}.bn1", classifier.first_statistics, reference.classifier[exit].bn1)
            yield from both(f"theta{exit}.bn2", classifier.second_statistics, reference.classifier[exit].bn2)


def _output_edges(model, reference):
    """(position among the edges of its scale, source map, our output module, the reference's edge)."""
    T = model.lattice.output
    for scale, output in model.outputs.items():
        feeding = [i for i in model.lattice.inputs[T] if model.lattice.scale(i) == int(scale)]
        for position, source in enumerate(feeding):
            yield position, source, output, reference.edge[f"{source}_{T}"]
