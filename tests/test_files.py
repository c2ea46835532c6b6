"""Finding files below a folder; reading texts and captions; digests of files."""
import pytest
from helpers import write_files

from common.config import UserError
from common.data import files


def test_links_to_folders_are_entered_once_broken_ones_counted_and_hidden_folders_left_out(
        tmp_path, capsys):
    write_files(tmp_path, {"elsewhere/deep/b": b"", "data/own/a": b"", "data/.trash/c": b""})
    folder = tmp_path / "data"
    links = {
        "first": tmp_path / "elsewhere",
        "second": tmp_path / "elsewhere",
        "own/cycle": folder,
        "itself": folder / "itself",
        "broken": tmp_path / "nowhere",
        "file": folder / "own/a",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    names = [path.relative_to(folder).as_posix() for path in files.files_below(folder)]
    assert names == ["file", "first/deep/b", "own/a"]
    message = f"note: 2 broken links are skipped: {folder / 'broken'}"
    assert message in capsys.readouterr().err


def test_runs_and_samples_below_a_folder_are_no_data_unless_the_folder_itself_is_one(
        tmp_path, capsys):
    write_files(tmp_path, {"a.wav": b"", "run/auto_resume.json": b"", "run/samples/b.wav": b""})
    files.mark_output(tmp_path / "deep/pictures")
    write_files(tmp_path, {"deep/pictures/c.png": b"", "deep/d.wav": b""})
    files.mark_output(tmp_path / "sounds")
    write_files(tmp_path, {"sounds/0_real.wav": b""})
    names = [path.relative_to(tmp_path).as_posix() for path in files.files_below(tmp_path)]
    assert names == ["a.wav", "deep/d.wav"]
    message = f"note: 3 folders of runs or samples are skipped: {tmp_path / 'deep/pictures'}, …"
    assert message in capsys.readouterr().err
    assert tmp_path / "run/samples/b.wav" in files.files_below(tmp_path / "run")


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PermissionError, match=str(tmp_path)):
        files.files_below(tmp_path)


def test_a_caption_may_be_missing_one_text_or_several_of_which_the_first_counts():
    for value in (None, [], "", " ", [" "]):
        assert files.clean_caption(value) == ""
    for value in (" a\n", [" a "], ["a", "b"]):
        assert files.clean_caption(value) == "a"
    for value in (1, {"a": 1}, [1]):
        with pytest.raises(TypeError, match="neither a text"):
            files.clean_caption(value)


def test_a_digest_changes_with_names_sizes_and_contents(tmp_path):
    def digest(**contents):
        write_files(tmp_path, {name: text.encode() for name, text in contents.items()})
        return files.digest_of([tmp_path / name for name in contents])

    first = digest(a="one", b="two")
    assert digest(a="one", b="two") == first
    others = [digest(a="one", c="two"), digest(a="one", b="twos"), digest(a="one", b="twO")]
    assert len({first, *others}) == 4


def test_texts_are_those_of_the_flag_or_the_lines_of_a_file_in_utf_8(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text(" ein rotes △\r\n\n빨간 😀\n", encoding="utf-8-sig")
    assert files.texts_of("", path) == ["ein rotes △", "빨간 😀"]
    assert [files.texts_of(text, "") for text in (" a b ", "")] == [["a b"], []]
    with pytest.raises(UserError, match=r"^--text: no text in it"):
        files.texts_of(" ", "")
    for content, message in (
        ("über".encode("cp1252"), "not UTF-8 text"),
        ("over".encode("utf-16-le"), "not UTF-8 text"),
        (b"\n", "no text"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"texts\.txt: .*{message}"):
            files.texts_of("", path)
