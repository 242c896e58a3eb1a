"""What the processes of a run compute and compare together."""

import numpy as np
import pytest

from configs.errors import UserError
from trainer import multihost


def test_one_process_is_all_of_them() -> None:
    assert multihost.is_first_process() and multihost.gather("a") == ["a"]
    assert multihost.from_first_process(lambda: 7) == 7
    multihost.check_same({"content_hash": "a"}, "Nothing to do.")


def test_what_differs_is_named_by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    of_all = [{"hash": "a", "seed": "1"}, {"hash": "b", "seed": "1"}, {"seed": "1", "extra": "x"}]
    monkeypatch.setattr(multihost, "gather", lambda _: of_all)
    with pytest.raises(UserError) as raised:
        multihost.check_same({}, "Give all the same.")
    _, *problems, remedy = str(raised.value).splitlines()
    assert [line.strip() for line in problems] == [
        "hash: a in process 0, b in process 1.",
        "hash: a in process 0, absent in process 2.",
        "extra: absent in process 0, x in process 2.",
    ]
    assert remedy.strip() == "Give all the same."


def test_groups_of_devices_are_those_that_differ_in_some_mesh_axes_alone() -> None:
    class Devices:
        devices = np.arange(6).reshape(2, 3)

    groups = [group.tolist() for group in multihost._groups(Devices())]
    assert groups == [[0, 3], [1, 4], [2, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5]]
