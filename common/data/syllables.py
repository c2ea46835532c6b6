"""Score audio generated from the built-in recordings: are its syllables and its voice right?"""

import numpy as np

from common.data import synthetic
from common.models import audio, semantic

MIN_SECONDS = 0.2  # shorter sounds have no measurable pitch
MAX_TEXT_SECONDS = 2.0  # maximum length of the audio generated for a text


class SyllableScores:
    """Scores audio that a pipeline (train_audio.Pipeline) generates for recordings.Syllables.

    Scores are appended to `found`, a defaultdict {metric: values}. Metrics ending in _real are
    upper bounds: they score real recordings that passed through the codec.
    """

    def __init__(self, pipeline, dataset, indices, found):
        """indices: training recordings, used to find the syllable of each semantic token."""
        self.pipeline = pipeline
        self.dataset = dataset
        self.found = found
        # Tokens are clusters without names: assign each to the syllable in which it occurs most.
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
        """Score a continuation.

        wave (T,): the real recording. sound (T',): its first `start` samples, which are the prompt,
        followed by generated audio.
        """
        codec = self.pipeline.codec
        real = codec.decode(codec.encode(wave))
        self.add_text("text_heard_real", index, real)
        least = start + MIN_SECONDS * self.dataset.rate
        prompt = self.voice(wave[:start])
        sounds = {"voice_kept_real": real, "voice_kept": sound}
        for name, whole in sounds.items():
            is_long_enough = len(whole) >= least  # else there is too little to compare
            kept = is_long_enough and synthetic.same_voice(prompt, self.voice(whole[start:]))
            self.found[name].append(kept)

    def add_texts(self, indices, seeds):
        """Generate audio from the texts of recordings, without a prompt, and score it."""
        texts = [self.dataset.texts[index] for index in indices]
        prompts = [self.pipeline.empty_prompt()] * len(texts)
        sounds = self.pipeline.generate(prompts, MAX_TEXT_SECONDS, seeds, texts)
        for index, codes in zip(indices, sounds):
            self.add_text("text_heard", index, self.pipeline.codec.decode(codes))

    def add_text(self, name, index, wave):
        """Add max(0, 1 - syllable error rate) of a wave (T,) to the metric `name`.

        index: the recording whose text is expected.
        """
        labels = self.syllable_of_token[self.pipeline.kmeans.encode(wave)]
        syllables = synthetic.recognize_syllables(labels)
        text = self.dataset.texts[index].split()
        self.found[name].append(synthetic.text_similarity(syllables, text))

    def voice(self, wave):
        """The (pitch, timbre) of a wave (T,)."""
        wave = audio.resample(wave, self.dataset.rate, synthetic.RATE)
        return synthetic.estimate_voice(wave.numpy())
