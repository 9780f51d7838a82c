import itertools

from cnmm.palette import CAMVID, CITYSCAPES, MOST_CLASSES, VOID_COLOUR, default_palette


def test_palettes_have_one_colour_per_class():
    assert (len(CAMVID), len(CITYSCAPES)) == (11, 19)
    for palette in (CAMVID, CITYSCAPES, default_palette(MOST_CLASSES)):
        assert len({*palette, VOID_COLOUR}) == len(palette) + 1
        assert all(0 <= value <= 255 for colour in palette for value in colour)


def test_default_colours_are_far_apart_and_do_not_depend_on_how_many_there_are():
    palette = default_palette(20)
    for a, b in itertools.combinations((*palette, VOID_COLOUR, (255, 255, 255)), 2):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) >= 42, (a, b)
    assert default_palette(7) == palette[:7]
