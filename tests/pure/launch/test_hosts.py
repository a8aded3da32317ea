"""Host lists: valid hosts are parsed, and text that a shell or ssh would interpret is refused."""

from __future__ import annotations

import shlex
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.errors import RunError
from autopipe.launch.remote.hosts import assign, parse_hostfile, parse_hosts, total_slots
from autopipe.launch.remote.ssh_peers import command_of
from autopipe.launch.request import Host, LaunchSettings

HARMLESS = set(string.ascii_letters + string.digits + "._-@:")


def test_names_users_addresses_and_slots_are_parsed():
    assert parse_hosts("h1:2, me@h2.example.org:8,10.0.0.7,[fe80::1]:4,me@[::2]") == (
        Host("h1", 2),
        Host("me@h2.example.org", 8),
        Host("10.0.0.7"),
        Host("fe80::1", 4),
        Host("me@::2"),
    )


def test_a_host_file_is_parsed():
    text = "# two machines\nh1 slots=8\n\nme@h2 slots=4   # the small one\nh3\n"
    assert parse_hostfile(text) == (Host("h1", 8), Host("me@h2", 4), Host("h3"))


@pytest.mark.parametrize(
    "text",
    (
        *("", ",", "h1,,h2", "-oProxyCommand=x", "h1:-oProxyCommand=x", "h1:0", "h1:", "h1:2:3", "h1;ls", "h1 h2"),
        *("$(ls)", "h1:٣", "a@b@c", "@h1", "h1@", "[::1", "[zz]", "[::1]2", "h1:99999", "h1,h1", "hé", "h1\n-x"),
        *("h-", ".h", "x" * 300),
    ),
)
def test_an_invalid_host_list_is_refused(text: str):
    with pytest.raises(ValueError, match=r"."):
        parse_hosts(text)


@pytest.mark.parametrize(
    "text", ["", "# none", "h1 slots=", "h1 slots=0", "h1 slots=2 x", "h1 2", "-x slots=2", "h1\nh1"]
)
def test_an_invalid_host_file_is_refused(text: str):
    with pytest.raises(ValueError, match=r"."):
        parse_hostfile(text)


@given(
    st.text(alphabet=st.sampled_from("h1.-_@:[], \n\t;|&$`'\"\\<>(){}*?!#~=%é\0"), max_size=20) | st.text(max_size=20)
)
def test_a_shell_metacharacter_is_refused(text: str):
    try:
        hosts = parse_hosts(text)
    except ValueError:
        return
    for host in hosts:
        assert set(host.name) <= HARMLESS
        assert not host.name.startswith(("-", "@", "."))
        assert shlex.split(host.name) == [host.name]


@given(st.text(min_size=1, max_size=30).filter(lambda text: "\0" not in text))
def test_the_remote_command_has_the_same_words_after_a_shell_parsed_it(python: str):
    words = command_of("h1", LaunchSettings(hosts=(Host("h1"),), remote_python=python))
    assert words[0] == "ssh" and words[-3:-1] == ("--", "h1")
    assert shlex.split(words[-1]) == [python, "-P", "-m", "autopipe.launch.remote.peer"]


def test_this_machine_needs_no_ssh():
    assert command_of("localhost", LaunchSettings(remote_python="/p")) == (
        "/p",
        "-P",
        "-m",
        "autopipe.launch.remote.peer",
    )


def test_neighbouring_ranks_share_a_host():
    assert assign(parse_hosts("a:2,b:2"), 4) == ((0, 1), (2, 3))
    assert assign(parse_hosts("a:2,b:2"), 3) == ((0, 1), (2,))
    assert assign(parse_hosts("a:4,b:4"), 3) == ((0, 1, 2), ())
    assert assign(parse_hosts("a,b"), 4) == ((0, 1), (2, 3))
    assert assign(parse_hosts("a,b,c"), 4) == ((0,), (1,), (2, 3))
    assert assign(parse_hosts("a:3,b,c"), 5) == ((0, 1, 2), (3,), (4,))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 30))
def test_every_rank_has_one_host(slots: list[int], num_ranks: int):
    hosts = [Host(f"h{index}", count) for index, count in enumerate(slots)]
    try:
        places = assign(hosts, num_ranks)
    except RunError as error:
        assert 0 not in slots and sum(slots) < num_ranks
        assert str(num_ranks) in error.what and f"--gpus {sum(slots)}" in error.remedy
        return
    assert [rank for ranks in places for rank in ranks] == list(range(num_ranks))
    assert all(not host.slots or len(ranks) <= host.slots for host, ranks in zip(hosts, places, strict=True))


def test_the_slots_decide_the_number_of_ranks_if_all_are_given():
    assert total_slots(parse_hosts("a:2,b:3")) == 5
    assert total_slots(parse_hosts("a:2,b")) is None
    assert total_slots(()) is None
