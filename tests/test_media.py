"""Grids of images: everything is in its place."""
import textwrap

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from common.data import media, synthetic


@pytest.mark.parametrize("size, scale", [(20, 5), (200, 1)])
def test_a_captioned_grid_has_enlarged_pictures_in_their_places_above_their_captions(size, scale):
    images, _ = synthetic.shapes(range(5), size=size)
    captions = ["Größe 9!", "", "a large red circle on blue", "long " * 200, "a"]
    side = scale * size
    sheet = media.captioned_grid(images, captions, columns=3)
    tile = side + 4 * 10 + 4
    height = 2 * tile + 4
    width = 3 * (side + 4) + 4
    expected = np.full((height, width, 3), 255, np.uint8)
    for i, (image, caption) in enumerate(zip(images, captions)):
        row, column = divmod(i, 3)
        place = expected[4 + tile * row :, 4 + (side + 4) * column :]
        enlarged = np.kron(image, np.ones((scale, scale, 1)))
        place[:side, :side] = enlarged
        lines = textwrap.wrap(caption, side // 6, max_lines=4, placeholder=" ...")
        for y, line in enumerate(lines):
            for x, character in enumerate(line.lower()):
                glyph = media.GLYPHS[media.CHARACTERS.find(character)]
                cell = place[side + 10 * y + 2 :, 6 * x :]
                cell[:8, :6][glyph == 1] = 0
    assert_array_equal(sheet, expected)
