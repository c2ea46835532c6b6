"""Print the ceiling of `picture_retrieval`: what real pictures reach in place of drawn ones.

    python tests/benchmarks/picture_ceiling.py --data images --clip runs/clip_images

`train_decoder.py evaluate --prior` draws a picture from each held-out caption, and counts how often
the nearest of 100 held-out real pictures has that caption. Here another real picture of the caption
takes the place of the drawn one. So the data must have captions that come more than once, as emoji
have that two artists drew. The splits are those of the scripts' defaults.
"""

import argparse
import collections
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.data import embed, images
from common.models import clip


def embed_all(data, clip_model):
    """(embeddings (N, D) of unit length, captions, keys) of all images that can be read."""
    embeds = []
    captions = []
    keys = []
    for batch, records in embed.read(data, clip_model.image_size):
        with torch.no_grad():
            embeds.append(clip_model.embed_image(torch.tensor(batch)).double())
        captions += [record["caption"] for record in records]
        keys += [record["key"] for record in records]
    return F.normalize(torch.cat(embeds), dim=-1).numpy(), captions, keys


def find_by_others(embeds, captions, test_rows):
    """For each held-out row whose caption another row has: whether that row's picture finds it.

    embeds (N, D), captions: of all pictures. test_rows: those held out, compared by the hundred.
    """
    rows_of_caption = collections.defaultdict(list)
    for row, caption in enumerate(captions):
        rows_of_caption[caption].append(row)

    hits = []
    for start in range(0, len(test_rows) - clip.GALLERY + 1, clip.GALLERY):
        gallery = np.array(test_rows[start : start + clip.GALLERY])
        for row in gallery:
            others = [other for other in rows_of_caption[captions[row]] if other != row]
            if not others:
                continue
            other = others[row % len(others)]
            similarity = embeds[gallery] @ embeds[other]
            similarity[gallery == other] = -1  # it must not find itself
            nearest = gallery[similarity.argmax()]
            hits.append(captions[nearest] == captions[row])
    return hits


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="tars or a folder of captioned images")
    parser.add_argument("--clip", required=True, help="as --clip of train_decoder.py")
    args = parser.parse_args()

    clip_model = clip.load(args.clip, "cpu")
    embeds, captions, keys = embed_all(args.data, clip_model)
    dataset = images.CaptionedImages(args.data)
    test_keys = {dataset.key(index) for index in dataset.split("test", 0.1, 0.1)}
    test_rows = [row for row, key in enumerate(keys) if key in test_keys]
    hits = find_by_others(embeds, captions, test_rows)
    if not hits:
        parser.error(
            f"--data {args.data}: expected {clip.GALLERY} held-out pictures or more, and captions "
            "that come more than once"
        )
    print(f"picture_retrieval of real pictures {np.mean(hits):.4f} ({len(hits)} held-out captions)")


if __name__ == "__main__":
    main()
