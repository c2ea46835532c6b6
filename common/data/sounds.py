"""Write audio as WAV files."""

import wave as wavfile
from pathlib import Path

from common import checkpoint, dist


def write_sound(wave, sample_rate, path):
    """Write a wave (T,), clipped to ±1, as a WAV file of 16-bit PCM, atomically."""
    samples = (wave * 32768).round().clamp(-32768, 32767).short().numpy()
    with checkpoint.atomic_write(path) as file, wavfile.open(file, "wb") as output:
        output.setnchannels(1)
        output.setsampwidth(2)
        output.setframerate(sample_rate)
        output.writeframes(samples.tobytes())


def write_sounds(sounds, sample_rate, folder, name):
    """Write audio to samples/NAME_NUMBER.wav in a run folder; returns {file: caption}.

    sounds: a generator of (number, wave (T,), caption), which runs only on rank 0. Other ranks
    return {}.
    """
    written = {}
    if dist.is_main():
        for number, wave, caption in sounds:
            path = f"samples/{name}_{number}.wav"
            write_sound(wave, sample_rate, Path(folder) / path)
            written[path] = caption
    return written
