"""Figures that others published: macs in millions and accuracy or mIoU in %, on test images (Cityscapes: validation).

MSDNet's are digitised from a figure of RANet's authors (Yang et al., CVPR 2020), with macs of an image that passes all
exits; those of early exit are averages. Macs of slimming are half of its printed FLOPs. CondenseNet's, its
second version's and slimming's points are one network each; the curves of MSDNet are one network. ESPNet's (Mehta et
al., ECCV 2018; CamVid at 360x480 as reported with its code, Cityscapes at 512x1024) and ESPNetv2's (CVPR 2019, at
512x1024, from ImageNet weights) are their authors'; their macs are counted from the networks' descriptions.
"""

from __future__ import annotations

Points = tuple[tuple[float, float], ...]

_MSDNET_MACS = (15.0, 25.2, 37.4, 51.6, 61.7, 73.5, 87.1, 99.4, 109.4, 121.0)
_MSDNET = {
    "cifar10": (89.5, 90.8, 91.5, 92.6, 93.0, 93.2, 93.5, 93.6, 93.7, 93.7),
    "cifar100": (61.3, 64.6, 67.5, 69.4, 70.8, 72.1, 72.7, 73.9, 74.0, 74.1),
}

ONE_NETWORK: dict[str, dict[str, Points]] = {
    data: {"MSDNet (published)": tuple(zip(_MSDNET_MACS, accuracy, strict=True))} for data, accuracy in _MSDNET.items()
}
"""Curves of one network: by data set and name."""
EARLY_EXIT: dict[str, dict[str, Points]] = {
    "cifar10": {"MSDNet (published)": ((20.0, 92.5), (25.0, 93.1), (45.0, 93.75))},
}
"""The same with early exit, macs on average."""
MANY_NETWORKS: dict[str, dict[str, Points]] = {
    "cifar10": {
        "CondenseNet": ((28.6, 93.78), (51.9, 94.72), (65.8, 94.94), (81.3, 95.17), (98.2, 95.37)),
        "CondenseNetV2": ((41.0, 95.35), (62.0, 95.65)),
        "DenseNet-40, slimmed": ((120.0, 94.35), (190.0, 94.81)),
        "ResNet-164, slimmed": ((137.0, 94.73), (190.0, 94.92)),
    },
    "cifar100": {
        "CondenseNet": ((65.8, 76.36),),
        "CondenseNetV2": ((41.0, 76.06), (62.0, 77.48)),
        "DenseNet-40, slimmed": ((141.0, 74.28), (186.0, 74.72)),
        "ResNet-164, slimmed": ((124.0, 76.09), (167.0, 77.13)),
    },
    "camvid": {"ESPNet": ((1310.0, 55.6),)},
    "cityscapes": {
        "ESPNet": ((4510.0, 61.4),),
        "ESPNetv2": ((596.0, 53.9), (1085.0, 60.1), (1713.0, 63.8), (2698.0, 66.4)),
    },
}
"""Points of which each is a network of its own."""
