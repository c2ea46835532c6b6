"""Sounds as files: WAV, with a picture of the spectrum beside it."""

from pathlib import Path

from common import checkpoint, dist
from common.data import media, recordings


def write_sound(wave, sample_rate, path):
    """Write a wave (T,) to a .wav file, and its spectrogram beside it as .png."""
    with checkpoint.atomic_write(path) as file:
        recordings.write_wav(file, wave, sample_rate)
    with checkpoint.atomic_write(Path(path).with_suffix(".png")) as file:
        media.write_png(file, recordings.spectrogram(wave, sample_rate))


def write_sounds(sounds, sample_rate, folder, name):
    """Write sounds as samples/NAME_NUMBER.wav in a run folder; returns {file: caption}.

    sounds: yields (number, wave (T,), caption). Rank 0 alone runs it; the others return {}.
    """
    written = {}
    if not dist.is_main():
        return written
    for number, wave, caption in sounds:
        path = f"samples/{name}_{number}"
        write_sound(wave, sample_rate, Path(folder) / f"{path}.wav")
        written |= {f"{path}.wav": caption, f"{path}.png": caption}
    return written
