"""Logs in every known format, whole and broken."""

from __future__ import annotations

import csv
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mtserve_plugin.errors import ConfigError, InputError, MissingDependencyError
from mtserve_plugin.workload import LogFormat, load_trace, log_files, log_reader, read_log

DATA = Path(__file__).parents[1] / "data"


def rows(log):
    return list(zip(log.user.tolist(), log.item.tolist(), log.action.tolist(), log.time_ms.tolist(), strict=True))


def test_kuairand_folder_reads_both_halves_and_packs_the_flags():
    log = read_log(DATA / "kuairand")
    assert rows(log) == [
        (3, 900, 0b01000001, 1649383200000),
        (3, 901, 0, 1649383259999),
        (3, 900, 0b10000011, 1649383260000),
        (0, 77, 0b00000100, 1649383230500),
        (0, 900, 0b00111000, 1650589200000),
        (3, 4369952, 0b01000001, 1650729599999),
        (0, 78, 0, 1650589199000),
    ]
    assert log.num_actions == 256
    assert log.actions[0] == "is_click"
    assert load_trace(DATA / "kuairand").name == "kuairand-1k"


def test_kuairand_data_folder_one_file_and_missing_half(tmp_path):
    nested = tmp_path / "KuaiRand-1K" / "data"
    nested.mkdir(parents=True)
    for name in log_files.KUAIRAND_FILES:
        (nested / name).write_bytes((DATA / "kuairand" / name).read_bytes())
    assert rows(read_log(nested.parent)) == rows(read_log(DATA / "kuairand"))
    assert len(read_log([nested / log_files.KUAIRAND_FILES[1]])) == 3
    (nested / log_files.KUAIRAND_FILES[1]).unlink()
    with pytest.raises(InputError, match=rf"{log_files.KUAIRAND_FILES[1]}: no such file.*10439422"):
        read_log(nested)


RATINGS = [(7, 20, 881250949000), (7, 10, 881250950000), (2, 20, 881250000000)]


@pytest.mark.parametrize(
    ("file", "ratings"),
    [
        ("logs/small.inter", ["3", "5", "10"]),
        ("movielens/u.data", ["3", "5", "1"]),
        ("movielens/ratings.dat", ["3", "5", "1"]),
        ("movielens/ratings.csv", ["3.0", "4.5", "0.5"]),
    ],
)
def test_ratings_become_actions_in_ascending_order(file, ratings):
    log = read_log(DATA / file)
    half_second = 500 if file.endswith(".inter") else 0
    times = [t + half_second * (i == 1) for i, (_, _, t) in enumerate(RATINGS)]
    assert [(u, i) for u, i, _, _ in rows(log)] == [(u, i) for u, i, _ in RATINGS]
    assert log.time_ms.tolist() == times
    assert list(log.actions) == sorted(ratings, key=float)
    assert [log.actions[code] for code in log.action] == ratings


def test_quotes_blank_lines_and_text_ids():
    log = read_log(DATA / "logs" / "quoted.csv")
    ann, ann_again, bob = log.user.tolist()
    assert ann == ann_again != bob
    assert log.item[0] == log.item[2] != log.item[1]
    assert log.time_ms.tolist() == [1700000000000, 1700000001000, 1700000000500]
    assert [log.actions[code] for code in log.action] == ["buy", "view", "view"]


def test_ids_are_integers_where_they_fit_and_the_same_hash_everywhere_else():
    told = LogFormat(user="who", item="what", time="when", action="how")
    log = read_log(DATA / "logs" / "own_names.csv", told)
    assert log.user[1] == -5
    assert log.user[0] == read_log(DATA / "logs" / "quoted.csv").user[0] == stable_hash(b"ann")
    assert log.user[2] == stable_hash(b"9223372036854775808")
    assert log.item.tolist() == [1, 1, 2]


def stable_hash(text):
    """FNV-1a and the finaliser of splitmix64, in plain integers, as a signed word."""
    word = 0xCBF29CE484222325
    for byte in text:
        word = (word ^ byte) * 0x100000001B3 % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return word - 2**64 if word >> 63 else word


def test_integers_at_the_edge(tmp_path):
    edges = (0, -1, 2**63 - 1, -(2**63), 10**18, 10**19 - 1, 2**63, -(2**63) - 1)
    texts = [str(v) for v in edges] + ["+5", "1.0", "-", "1" * 19, "1" * 25]
    file = tmp_path / "edge.csv"
    file.write_text("user,item,ts\n" + "".join(f"{t},1,{i + 1}\n" for i, t in enumerate(texts)))
    user = read_log(file).user
    assert user[:5].tolist() == [0, -1, 2**63 - 1, -(2**63), 10**18]
    assert len(set(user.tolist())) == len(texts)


def test_columns_and_units_can_be_told():
    told = LogFormat(columns=("user", "item", "when"), time="when", delimiter="|", action="")
    log = read_log(DATA / "logs" / "headerless.txt", told)
    assert log.time_ms.tolist() == [1700000000123, 1700000001123]
    assert log.num_actions == 1
    seconds = read_log(DATA / "movielens" / "u.data", LogFormat(time_unit="ms"))
    assert seconds.time_ms.tolist() == [t // 1000 for _, _, t in RATINGS]
    with pytest.raises(ConfigError, match="time_unit='h'"):
        LogFormat(time_unit="h")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("ragged.csv", r"ragged.csv: line 3: 2 fields where 3 columns are expected \(user_id.*mend"),
        ("bad_time.csv", r"bad_time.csv: line 3: column 'timestamp': 'yesterday' is not a number; mend"),
        ("nan_time.csv", r"nan_time.csv: line 4: column 'timestamp': 'nan' is not a finite number"),
        ("negative_time.csv", r"negative_time.csv: line 2: column 'timestamp': '-1' is a negative time"),
        ("empty_id.csv", r"empty_id.csv: line 3: column 'item_id': '' is empty; give every row an id"),
        (
            "no_time.csv",
            r"no_time.csv: line 1: no column for the time .* user_id, item_id, date; name it with time=",
        ),
        ("no_header.csv", r"no_header.csv: line 1: looks like data.*columns=\("),
        ("header_only.csv", r"header_only.csv: holds no events; give a file"),
        ("empty.csv", r"empty.csv: is empty; give a file"),
        ("open_quote.csv", r"open_quote.csv: line 2: .*close the quotes"),
        ("bad_flag.csv", r"bad_flag.csv: line 3: column 'is_follow': 'maybe' is not a number"),
        ("absent.csv", r"absent.csv: no such file or folder; give the path"),
    ],
)
def test_broken_files_are_named_with_line_column_and_fix(file, message):
    with pytest.raises(InputError, match=message):
        read_log(DATA / "malformed" / file)


def test_the_usual_names_have_an_order(tmp_path):
    # KuaiSAR's times come twice: readable, and in milliseconds.
    (tmp_path / "log.csv").write_text(
        "user_id,item_id,time,timestamp,click\n1,2,2023-05-22 15:53:20,1684742000500.0,1\n"
    )
    assert read_log(tmp_path).time_ms.tolist() == [1684742000500]


def test_wrong_wishes_are_named(tmp_path):
    with pytest.raises(InputError, match=r"ragged.csv: line 1: column 'customer' \(user\) is missing; found user_id"):
        read_log(DATA / "malformed" / "ragged.csv", LogFormat(user="customer"))
    with pytest.raises(InputError, match="must be different columns"):
        read_log(DATA / "malformed" / "ragged.csv", LogFormat(user="item_id"))
    with pytest.raises(InputError, match="holds no log"):
        read_log(Path(__file__).parent)
    for name in ("own_names.csv", "quoted.csv"):
        (tmp_path / name).write_bytes((DATA / "logs" / name).read_bytes())
    with pytest.raises(InputError, match=r"holds 2 logs \(own_names.csv, quoted.csv\); name the one"):
        read_log(tmp_path)
    with pytest.raises(InputError, match="empty list"):
        read_log([])


def test_archives(tmp_path):
    inter = (DATA / "logs" / "small.inter").read_bytes()
    wheel = tmp_path / "recbole-9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("recbole/dataset_example/ml-100k/ml-100k.inter", inter)
        archive.writestr("recbole/ratings.csv", "not this one")
    assert rows(read_log(wheel)) == rows(read_log(DATA / "logs" / "small.inter"))
    assert load_trace(wheel, min_history=0).name == "ml-100k"
    wheel.write_bytes(b"PK no archive")
    with pytest.raises(InputError, match=r"recbole-9-py3-none-any.whl: cannot be read as an archive"):
        read_log(wheel)


def test_ml_100k_comes_from_the_package_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps recbole"):
        read_log("ml-100k")
    monkeypatch.undo()
    folder = tmp_path / "recbole" / "dataset_example" / "ml-100k"
    folder.mkdir(parents=True)
    (tmp_path / "recbole" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "ml-100k.inter").write_bytes((DATA / "logs" / "small.inter").read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(read_log("ml-100k")) == 3
    assert load_trace("ml-100k", min_history=0).name == "ml-100k"


@pytest.mark.parametrize("piece", [1, 64, 700, 1 << 20])
@pytest.mark.parametrize("quoted", [False, True])
def test_pieces_agree_with_the_csv_module(tmp_path, monkeypatch, piece, quoted):
    rng = np.random.default_rng(piece + quoted)
    lines, expected = ["junk,user_id,ts,item_id,rating"], []
    for _ in range(200):
        user = str(rng.integers(-(2**62), 2**62)) if rng.random() < 0.5 else str(rng.integers(0, 10))
        item = f'"i{rng.integers(9)}"' if quoted else f"i{rng.integers(9)}"
        time, rating = int(rng.integers(1, 10**9)), str(rng.integers(1, 12))
        lines.append(f"{'x' * rng.integers(0, 9)},{user},{time},{item},{rating}" + "\r" * int(rng.integers(2)))
        expected.append((int(user), item.strip('"'), rating, time * 1000))
        lines += [""] * int(rng.integers(5) == 0)
    text = "\n".join(lines)
    assert sum(1 for row in csv.reader(io.StringIO(text)) if row) == 201
    (tmp_path / "log.csv").write_bytes(text.encode())
    monkeypatch.setattr(log_reader, "_PIECE_BYTES", piece)
    log = read_log(tmp_path / "log.csv")
    texts = dict(zip(log.item.tolist(), (e[1] for e in expected), strict=True))
    assert len(texts) == len({e[1] for e in expected})
    found = [(u, texts[i], log.actions[a], t) for u, i, a, t in rows(log)]
    assert found == expected
    (tmp_path / "log.csv").write_bytes(f"{text}\nx,1,oops,i1,2".encode())
    with pytest.raises(InputError, match=f"line {len(lines) + 1}: column 'ts': 'oops'"):
        read_log(tmp_path / "log.csv")


def test_kind_of_action_must_not_change_between_files():
    with pytest.raises(InputError, match="read it alone"):
        read_log([DATA / "kuairand", DATA / "movielens" / "ratings.csv"])
