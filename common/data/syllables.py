"""Scores of sounds in the world of the built-in recordings: which syllables, in which voice."""

import numpy as np

from common.data import synthetic
from common.models import audio, semantic

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
        # Tokens are clusters without names: a vote names them.
        votes = np.zeros((pipeline.kmeans.clusters, len(synthetic.NAMES)))
        for index, wave in dataset.load_usable(indices).items():
            tokens = pipeline.kmeans.encode(wave)
            text = dataset.texts[index]
            labels = synthetic.syllable_labels(text, len(tokens), semantic.FRAME_RATE)
            np.add.at(votes, (tokens, labels), 1)
        self.syllable_of_token = votes.argmax(1)

    def add_continuation(
        self,
        index,
        wave,
        sound,
        start,
    ):
        """Score a recording's wave (T,), and the `sound` made of its samples before `start`."""
        codec = self.pipeline.codec
        real = codec.decode(codec.encode(wave))
        self.add_text("text_heard_real", index, real)
        least = start + MIN_SECONDS * self.dataset.rate  # all real ones are as long
        prompt = self.voice(wave[:start])
        sounds = {"voice_kept_real": real, "voice_kept": sound}
        for name, whole in sounds.items():
            goes_on = len(whole) >= least  # a sound that ends at once keeps no voice
            kept = goes_on and synthetic.same_voice(prompt, self.voice(whole[start:]))
            self.found[name].append(kept)

    def add_texts(self, indices, seeds):
        """Let the pipeline say the texts of recordings, without a prompt, and score it."""
        texts = [self.dataset.texts[index] for index in indices]
        prompts = [self.pipeline.empty_prompt()] * len(texts)
        sounds = self.pipeline.generate(prompts, MAX_TEXT_SECONDS, seeds, texts)
        for index, codes in zip(indices, sounds):
            self.add_text("text_heard", index, self.pipeline.codec.decode(codes))

    def add_text(self, name, index, wave):
        """Add 1 - syllable error rate of a wave (T,), at least 0."""
        labels = self.syllable_of_token[self.pipeline.kmeans.encode(wave)]
        syllables = synthetic.recognize_syllables(labels)
        text = self.dataset.texts[index].split()
        self.found[name].append(synthetic.text_similarity(syllables, text))

    def voice(self, wave):
        """The voice of a wave (T,)."""
        wave = audio.resample(wave, self.dataset.rate, synthetic.RATE)
        return synthetic.estimate_voice(wave.numpy())
