"""Sounds as WAV files."""

import wave as wavfile
from pathlib import Path

from common import checkpoint, dist


def write_sound(wave, sample_rate, path):
    """Write a wave (T,), clipped to ±1, as a WAV file of 16-bit PCM: all of it or nothing."""
    samples = (wave * 32768).round().clamp(-32768, 32767).short().numpy()
    with checkpoint.atomic_write(path) as file, wavfile.open(file, "wb") as output:
        output.setnchannels(1)
        output.setsampwidth(2)
        output.setframerate(sample_rate)
        output.writeframes(samples.tobytes())


def write_sounds(sounds, sample_rate, folder, name):
    """Write sounds as samples/NAME_NUMBER.wav in a run folder; returns {file: caption}.

    sounds: yields (number, wave (T,), caption). Rank 0 alone runs it; the others return {}.
    """
    written = {}
    if dist.is_main():
        for number, wave, caption in sounds:
            path = f"samples/{name}_{number}.wav"
            write_sound(wave, sample_rate, Path(folder) / path)
            written[path] = caption
    return written
