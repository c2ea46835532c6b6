"""Scores of generated audio on the built-in recordings: which syllables, in which voice."""

import numpy as np

from common.data import synthetic
from common.models import audio, semantic

MIN_SECONDS = 0.2  # shorter sounds have no measurable pitch
MAX_TEXT_SECONDS = 2.0  # maximum length of audio for a text


class SyllableScores:
    """Scores the audio that a pipeline (train_audio.Pipeline) makes from recordings.Syllables.

    Scores are appended to `found`, a defaultdict {metric: values}. Metrics ending in _real are for
    real recordings passed through the codec, an upper bound.
    """

    def __init__(self, pipeline, dataset, indices, found):
        """indices: training recordings, which tell the syllable of each semantic token."""
        self.pipeline = pipeline
        self.dataset = dataset
        self.found = found
        # Tokens are unnamed clusters: give each the syllable in which it occurs most.
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
        """Score a recording (T,), and the `sound` that continues its samples before `start`."""
        codec = self.pipeline.codec
        real = codec.decode(codec.encode(wave))
        self.add_text("text_heard_real", index, real)
        least = start + MIN_SECONDS * self.dataset.rate
        prompt = self.voice(wave[:start])
        sounds = {"voice_kept_real": real, "voice_kept": sound}
        for name, whole in sounds.items():
            is_long_enough = len(whole) >= least  # otherwise there is no continuation to compare
            kept = is_long_enough and synthetic.same_voice(prompt, self.voice(whole[start:]))
            self.found[name].append(kept)

    def add_texts(self, indices, seeds):
        """Let the pipeline speak the texts of recordings, without a prompt, and score the audio."""
        texts = [self.dataset.texts[index] for index in indices]
        prompts = [self.pipeline.empty_prompt()] * len(texts)
        sounds = self.pipeline.generate(prompts, MAX_TEXT_SECONDS, seeds, texts)
        for index, codes in zip(indices, sounds):
            self.add_text("text_heard", index, self.pipeline.codec.decode(codes))

    def add_text(self, name, index, wave):
        """Add max(0, 1 - syllable error rate) of a wave (T,)."""
        labels = self.syllable_of_token[self.pipeline.kmeans.encode(wave)]
        syllables = synthetic.recognize_syllables(labels)
        text = self.dataset.texts[index].split()
        self.found[name].append(synthetic.text_similarity(syllables, text))

    def voice(self, wave):
        """The (pitch, timbre) of a wave (T,)."""
        wave = audio.resample(wave, self.dataset.rate, synthetic.RATE)
        return synthetic.estimate_voice(wave.numpy())
