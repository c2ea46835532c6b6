"""Sounds as WAV files."""

from pathlib import Path

from common import checkpoint, dist
from common.data import recordings


def write_sound(wave, sample_rate, path):
    """Write a wave (T,) to a .wav file, all of it or nothing."""
    with checkpoint.atomic_write(path) as file:
        recordings.write_wav(file, wave, sample_rate)


def write_sounds(sounds, sample_rate, folder, name):
    """Write sounds as samples/NAME_NUMBER.wav in a run folder; returns {file: caption}.

    sounds: yields (number, wave (T,), caption). Rank 0 alone runs it; the others return {}.
    """
    written = {}
    if not dist.is_main():
        return written
    for number, wave, caption in sounds:
        path = f"samples/{name}_{number}.wav"
        write_sound(wave, sample_rate, Path(folder) / path)
        written[path] = caption
    return written
