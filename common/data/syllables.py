"""Scores of sounds in the world of the built-in recordings: which syllables, in which voice."""

import numpy as np

from common.data import recordings, synthetic
from common.models import semantic

MIN_SECONDS = 0.2  # shorter sounds have no measurable pitch
MAX_TEXT_SECONDS = 2.0  # longest sound of a text


class SyllableScores:
    """Scores of what a pipeline (train_audio.Pipeline) makes of recordings.Syllables.

    They are added to `found`, a defaultdict {metric: values}. Those ending in _real are of the real
    recordings after the codec: the best that can be reached.
    """

    def __init__(self, pipeline, dataset, indices, found):
        """indices: of training. By these each semantic token gets the syllable it mostly is."""
        self.pipeline = pipeline
        self.dataset = dataset
        self.found = found
        usable = dataset.load_usable(indices)
        tokens = []
        labels = []
        for record, wave in zip(dataset.records(usable), usable.values()):
            tokens_of_wave = pipeline.kmeans.encode(wave)
            tokens.append(tokens_of_wave)
            labels.append(
                synthetic.syllable_labels(record, len(tokens_of_wave), semantic.FRAME_RATE)
            )
        # Tokens are clusters without names: a vote names them.
        self.syllable_of_token = synthetic.majority(
            np.concatenate(tokens),
            np.concatenate(labels),
            pipeline.kmeans.clusters,
        )

    def add_continuation(self, index, wave, sound, start):
        """Score a recording's wave (T,), and the `sound` made of its samples before `start`."""
        codec = self.pipeline.codec
        real = codec.decode(codec.encode(wave))
        self.add_text("text_heard_real", index, real)
        least = start + MIN_SECONDS * self.dataset.rate
        if len(real) < least:  # neither counts
            return
        self.found["voice_kept_real"].append(self.same_voice(wave[:start], real[start:]))
        goes_on = len(sound) >= least  # a sound that ends at once keeps no voice
        kept = goes_on and self.same_voice(wave[:start], sound[start:])
        self.found["voice_kept"].append(kept)

    def add_texts(self, indices, seeds):
        """Let the pipeline say the texts of recordings, without a prompt, and score it."""
        texts = [self.dataset.text(index) for index in indices]
        prompts = [self.pipeline.empty_prompt()] * len(texts)
        sounds = self.pipeline.generate(prompts, MAX_TEXT_SECONDS, seeds, texts)
        for index, codes in zip(indices, sounds):
            self.add_text("text_heard", index, self.pipeline.codec.decode(codes))

    def add_text(self, name, index, wave):
        """Add 1 - syllable error rate of a wave (T,), at least 0."""
        syllables = self.syllable_of_token[self.pipeline.kmeans.encode(wave)]
        text = self.dataset.text(index).split()
        similarity = synthetic.text_similarity(synthetic.recognize_syllables(syllables), text)
        self.found[name].append(similarity)

    def same_voice(self, wave, other):
        """Whether two waves (T,) are of the same voice."""
        voices = []
        for each in (wave, other):
            each = recordings.resample(each, self.dataset.rate, synthetic.RATE)
            voices.append(synthetic.estimate_voice(each.numpy()))
        return synthetic.same_voice(*voices)
