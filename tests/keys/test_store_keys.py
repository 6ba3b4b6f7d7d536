"""Keys that a store serves its tenants under: which it takes from a directory, which not, and what it says."""

from __future__ import annotations

import errno
import json
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.block.errors import BadInput, KeysUnusable, TenantPurged
from kvstore.block.identity import KeyRing
from kvstore.block.key_file import KeyFile
from kvstore.config import KeysOptions
from kvstore.keys import pool_keys
from kvstore.keys.pool_keys import PoolKeys, SecretDirectory, file_name
from kvstore.keys.store_keys import StoreKeys, revive, ring_of
from kvstore.node import KeyRotation
from workbench import one_line, refused


@dataclass
class World:
    """A pool's directory, and a store's own file."""

    path: Path
    pool: SecretDirectory = field(init=False)

    def __post_init__(self) -> None:
        self.pool = SecretDirectory(self.path / "pool")
        pool_keys.init(self.pool, ["default", "b"], secrets.token_bytes)

    def opened(self, cold_start: str | None = None, *, own: bool = False) -> StoreKeys:
        options = KeysOptions(None if own else str(self.pool.path), cold_start)
        return StoreKeys(KeyFile(self.path / "keys"), options)

    def fingerprint(self, name: str = "default") -> str:
        return PoolKeys.read(self.pool).tenants[name].fingerprint

    def replace(self, name: str = "default") -> str:
        """Another identity of a tenant's."""
        (self.pool.path / file_name(name)).unlink()
        pool_keys.init(self.pool, [name], secrets.token_bytes)
        return self.fingerprint(name)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_without_a_directory_nothing_is_written_that_was_not_before(world: World) -> None:
    keys = world.opened(own=True)
    keys.tenant("default")
    assert json.loads((world.path / "keys").read_text())["version"] == 1
    assert keys.reload() == [] and keys.warnings() == []
    keys.retire("default")
    assert json.loads((world.path / "keys").read_text()) == {"version": 1, "tenants": {}}


def test_no_secret_of_a_pool_is_kept_here(world: World) -> None:
    keys = world.opened()
    assert keys.tenant("default").fingerprint.hex() == world.fingerprint()
    text = (world.path / "keys").read_text()
    for one in PoolKeys.read(world.pool).tenants.values():
        assert one.first[1].hex() not in text
    with refused(KeysUnusable, world.fingerprint(), "keys.directory"):
        world.opened(own=True).tenant("default")


def test_a_tenant_without_keys_there_gets_none(world: World) -> None:
    with refused(KeysUnusable, "guest", str(world.pool.path), "kvstore keys init", "kvstore keys import"):
        world.opened().tenant("guest")


def test_a_directory_that_is_not_there(world: World) -> None:
    with refused(KeysUnusable, "nowhere", "kvstore keys init"):
        StoreKeys(KeyFile(world.path / "keys"), KeysOptions(str(world.path / "nowhere")))


def test_a_store_that_goes_into_a_pool_keeps_its_identity_and_its_secret_goes(world: World) -> None:
    own = KeyFile(world.path / "keys")
    keys, secret = own.tenant("c"), json.loads((world.path / "keys").read_text())["tenants"]["c"]["secret"]
    pool_keys.take_in(world.pool, world.path / "keys")
    assert world.opened().tenant("c") == keys
    assert secret not in (world.path / "keys").read_text()


def test_another_identity_needs_an_explicit_cold_start(world: World) -> None:
    world.opened()
    before, now = world.fingerprint(), world.replace()
    with refused(KeysUnusable, before, now, f"keys.cold_start={now}"):
        world.opened().tenant("default")
    for wrong in (before, "00" * 8):
        with pytest.raises(KeysUnusable):
            world.opened(wrong).tenant("default")
    assert world.opened(now.upper()).tenant("default").fingerprint.hex() == now
    assert world.opened().tenant("default").fingerprint.hex() == now, "it is its identity from now on"
    assert world.opened(now).warnings() == [], "the word may stay"


def test_a_cold_start_is_a_start(world: World) -> None:
    """An identity that may take the place of another one does so when nothing is open yet."""
    other = World(world.path / "other")
    keys = world.opened(other.fingerprint())
    served = keys.tenant("default")
    (world.pool.path / "default.key").unlink()
    pool_keys.take_in(world.pool, other.pool.path, ["default"])
    assert keys.reload() == [] and keys.tenant("default") == served
    assert len(keys.warnings()) == 1 and "start again" in keys.warnings()[0]
    assert world.opened(other.fingerprint()).tenant("default").fingerprint.hex() == other.fingerprint()


def test_another_identity_than_a_secret_of_its_own(world: World) -> None:
    KeyFile(world.path / "keys").tenant("default")
    with refused(KeysUnusable, world.fingerprint(), "keys.cold_start"):
        world.opened().tenant("default")
    assert world.opened().tenant("b").fingerprint.hex() == world.fingerprint("b"), "others are served"


def test_what_goes_wrong_while_it_runs_changes_nothing_but_what_is_said(world: World) -> None:
    keys = world.opened()
    served = keys.tenant("default")
    file = world.pool.path / "default.key"
    raw = file.read_bytes()
    file.unlink()
    assert keys.reload() == [] and keys.tenant("default") == served
    assert len(keys.warnings()) == 1 and "gone" in keys.warnings()[0]
    file.write_bytes(raw[:-40])
    file.chmod(0o400)
    assert keys.reload() == [] and keys.tenant("default") == served
    assert len(keys.warnings()) == 1 and "damaged" in keys.warnings()[0]
    file.unlink()
    now = pool_keys.init(world.pool, ["default"], secrets.token_bytes)[0].fingerprint
    assert keys.reload() == [] and keys.tenant("default") == served
    assert len(keys.warnings()) == 1 and now in keys.warnings()[0] and served.fingerprint.hex() in keys.warnings()[0]
    file.unlink()
    file.write_bytes(raw)
    file.chmod(0o400)
    assert keys.reload() == [] and keys.warnings() == []
    world.pool.path.rename(world.path / "away")
    assert keys.reload() == [] and keys.tenant("default") == served and "away" not in keys.warnings()[0]
    (world.path / "away").rename(world.pool.path)
    assert keys.reload() == [] and keys.warnings() == []


def test_an_epoch_is_served_once_it_is_written_down(world: World) -> None:
    """With a full disk it is not, and it is tried again though nothing changes in the directory."""
    is_full = False

    def reach(point: str) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    keys = StoreKeys(KeyFile(world.path / "keys", reach), KeysOptions(str(world.pool.path)))
    is_full = True
    pool_keys.rotate(world.pool, "default", secrets.token_bytes)
    for _ in range(2):
        assert keys.reload() == [] and keys.tenant("default").epoch == 1
        assert len(keys.warnings()) == 1 and "No space left" in keys.warnings()[0]
    is_full = False
    assert keys.reload() == ["default"] and keys.tenant("default").epoch == 2 and keys.warnings() == []


def test_a_purged_tenant_does_not_come_back_with_a_mount(world: World) -> None:
    keys = world.opened()
    keys.retire("default")
    for one in (keys, world.opened(), world.opened(world.fingerprint())):
        one.reload()
        with pytest.raises(TenantPurged) as caught:
            one.tenant("default")
        assert one_line(caught.value, "purged", world.fingerprint(), "kvstore keys revive default")
        assert one.find("default") is None and str(caught.value) in one.warnings()
        assert one.tenant("b").fingerprint.hex() == world.fingerprint("b")
    now = world.replace()
    keys.reload()
    assert keys.tenant("default").fingerprint.hex() == now and keys.warnings() == [], "new keys are a way back"


def test_the_way_back(world: World) -> None:
    world.opened().retire("default")
    with refused(BadInput, "'b'", "default"):
        revive(world.path, "b")
    assert revive(world.path, "default") == [world.fingerprint()]
    assert world.opened().tenant("default").fingerprint.hex() == world.fingerprint()


def test_a_ring_for_looking_writes_nothing(world: World) -> None:
    world.opened()
    pool_keys.rotate(world.pool, "default", secrets.token_bytes)
    raw = (world.path / "keys").read_bytes()
    ring, names = ring_of(KeyFile(world.path / "keys"), str(world.pool.path))
    for one in PoolKeys.read(world.pool).tenants["default"].in_epochs():
        assert ring.mac_key(one.tenant, one.key_id, one.epoch) == one.mac and names[one.tenant] == "default"
    assert (world.path / "keys").read_bytes() == raw


def test_a_slow_mount_keeps_no_tenant_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, answered = world.opened(), []
    read = SecretDirectory.read

    def slow(directory: SecretDirectory, name: str) -> bytes:
        door = threading.Thread(
            target=lambda: answered.append((keys.tenant("default"), keys.warnings(), keys.served()))
        )
        door.start()
        door.join(10)
        assert not door.is_alive(), "it waits for the mount"
        return read(directory, name)

    pool_keys.rotate(world.pool, "default", secrets.token_bytes)
    monkeypatch.setattr(SecretDirectory, "read", slow)
    assert keys.reload() == ["default"] and len(answered) == 2


def test_what_is_wrong_is_told_of_the_right_tenant(world: World) -> None:
    """Whatever a tenant is called: as a file there, or as the directory."""
    names = ["default.key", str(world.pool.path)[-64:]]
    pool_keys.init(world.pool, names, secrets.token_bytes)
    world.opened()
    now = [world.replace(name) for name in names]
    (world.pool.path / "default.key").chmod(0o644)
    keys = world.opened()
    assert len(keys.warnings()) == 3
    for name, fragment in zip(("default", *names), ("0644", *now), strict=True):
        with refused(KeysUnusable, fragment):
            keys.tenant(name)
    assert keys.tenant("b").fingerprint.hex() == world.fingerprint("b")


def test_what_could_not_be_read_again_is_not_written(world: World) -> None:
    """Characters that JSON writes in twelve bytes: the file would be longer than one is read."""
    name, path = "\U0001d54f" * 60, world.path / "keys"
    epochs = {f"{number:016x}": number for number in range(1, 65)}
    tenants = {f"{name}{number}": {"fingerprint": f"{number:016x}", "epochs": epochs} for number in range(700)}
    purged = {f"{number:016x}": f"{name}{number}" for number in range(1000, 5000)}
    contents = {"version": 2, "tenants": tenants, "purged": purged}
    path.write_text(json.dumps(contents, ensure_ascii=False, separators=(",", ":")))
    path.chmod(0o600)
    before, own = path.read_bytes(), KeyFile(path)
    with refused(KeysUnusable, str(path), "4194304 bytes"):
        own.tenant("default")
    assert path.read_bytes() == before and not KeyFile(path).by_name()


# Against a model ------------------------------------------------------------------------------------------------------


class Emptied:
    """A store of which nothing stays, or all: what retired epochs signed is in use until it is let go."""

    is_loaded = True

    def __init__(self) -> None:
        self.signs: dict[bytes, int] = {}
        self.in_use = False

    def rotate(self, keys: object) -> None:
        self.signs[keys.tenant] = keys.epoch  # type: ignore[attr-defined]

    def retire(self, tenant: bytes, epochs: object, rows: object = None) -> dict[int, list[int]]:
        return {0: [1]} if self.in_use else {}


def test_a_tenant_that_is_purged_while_its_keys_are_followed(world: World) -> None:
    class Purging(Emptied):
        def rotate(self, keys: object) -> None:
            super().rotate(keys)
            if len(self.signs) == 1:
                followed.retire("b" if followed.known("default") == keys else "default")

    followed, ring, store = world.opened(), KeyRing(), Purging()
    followed.fill(ring)
    rotation = KeyRotation(followed, ring, store)  # type: ignore[arg-type]
    for name in ("default", "b"):
        pool_keys.rotate(world.pool, name, secrets.token_bytes)
    rotation.step()
    assert len(store.signs) == len(followed.served()) == 1 and [one.epoch for one in followed.tenants()] == [2]


class KeysMachine(RuleBasedStateMachine):
    """Rotations, retirements, purges, revivals, other identities, restarts, in any order: who is served under what."""

    path: Path

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        for one in list(self.path.iterdir()):
            if one.is_dir():
                for file in one.iterdir():
                    file.unlink()
            else:
                one.unlink()
        self.pool = SecretDirectory(self.path / "pool")
        pool_keys.init(self.pool, ["a", "b"], secrets.token_bytes)
        self.purged: set[str] = set()  # fingerprints
        self.identity: dict[str, str] = {}  # under which a tenant was served here
        self.accepts: dict[str, list[int]] = {}
        self.seen: dict[str, set[bytes]] = {}  # key ids that were ever accepted, by fingerprint
        self.store = Emptied()
        self.start(None)

    def there(self, name: str) -> pool_keys.TenantSecrets:
        return PoolKeys.read(self.pool).tenants[name]

    def start(self, cold_start: str | None) -> None:
        self.keys = StoreKeys(KeyFile(self.path / "keys"), KeysOptions(str(self.pool.path), cold_start))
        self.ring, self.store = KeyRing(), Emptied()
        self.keys.fill(self.ring)
        self.rotation = KeyRotation(self.keys, self.ring, self.store)  # type: ignore[arg-type]
        self.serving: set[str] = set()
        self.model(cold_start)

    def model(self, cold_start: str | None = None) -> None:
        """What a look at the directory is to change."""
        for name in ("a", "b"):
            one = self.there(name)
            had = self.identity.get(name)
            if one.fingerprint in self.purged:
                continue
            if had in (None, one.fingerprint) or (cold_start == one.fingerprint and name not in self.serving):
                self.identity[name] = one.fingerprint
                self.accepts[name] = [number for number, _ in one.epochs]
                self.serving.add(name)
                self.seen.setdefault(one.fingerprint, set()).update(keys.key_id for keys in one.in_epochs())

    @rule(name=st.sampled_from(["a", "b"]))
    def rotate(self, name: str) -> None:
        if len(self.there(name).epochs) < 5:
            pool_keys.rotate(self.pool, name, secrets.token_bytes)

    @rule(name=st.sampled_from(["a", "b"]), at=st.integers(0, 3))
    def retire(self, name: str, at: int) -> None:
        epochs = self.there(name).epochs
        if at < len(epochs) - 1:
            pool_keys.retire(self.pool, name, epochs[at][0])

    @rule(name=st.sampled_from(["a", "b"]))
    def replace(self, name: str) -> None:
        (self.pool.path / file_name(name)).unlink()
        pool_keys.init(self.pool, [name], secrets.token_bytes)

    @rule()
    def step(self) -> None:
        self.rotation.step()
        self.model()

    @rule(cold=st.sampled_from(["", "a", "b"]))
    def restart(self, cold: str) -> None:
        self.start(self.there(cold).fingerprint if cold else None)

    @rule(in_use=st.booleans())
    def use(self, in_use: bool) -> None:
        self.store.in_use = in_use

    @precondition(lambda self: self.serving)
    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.serving)))
        keys = self.keys.known(name)
        assert keys.fingerprint.hex() == self.identity[name]
        self.keys.retire(name)
        self.ring.forget(keys.tenant)
        self.purged.add(self.identity.pop(name))
        self.serving.discard(name)

    @rule(name=st.sampled_from(["a", "b"]))
    def revive_and_restart(self, name: str) -> None:
        try:
            self.purged -= set(revive(self.path, name))
        except BadInput:
            pass
        self.start(None)

    @invariant()
    def those_are_served_that_are_to_be(self) -> None:
        for name in ("a", "b"):
            if name not in self.serving:
                with pytest.raises(KeysUnusable):
                    self.keys.tenant(name)
                continue
            keys = self.keys.tenant(name)
            assert keys.fingerprint.hex() == self.identity[name] and keys.fingerprint.hex() not in self.purged
            assert keys.epoch == self.accepts[name][-1]
            assert [one.epoch for one in self.keys.accepted(name)] == self.accepts[name]
            accepted = {one.key_id for one in self.keys.accepted(name)}
            for one in self.keys.accepted(name):
                assert self.ring.mac_key(one.tenant, one.key_id, one.epoch) == one.mac
            assert self.ring.slab_key(keys.tenant, keys.fingerprint, 1) == keys.slab_mac
            for key_id in self.seen[self.identity[name]] - accepted:  # retired, perhaps long ago
                for epoch in range(1, 40):
                    assert not self.ring.mac_key(keys.tenant, key_id, epoch), "what was retired is accepted"
            assert {key_id for key_id, _ in self.keys.retired(name)} <= self.seen[self.identity[name]] - accepted

    @invariant()
    def nothing_secret_is_here(self) -> None:
        text = (self.path / "keys").read_text()
        for one in PoolKeys.read(self.pool).tenants.values():
            assert all(secret.hex() not in text for _, secret in (one.first, *one.epochs))


@pytest.mark.slow
def test_any_order_of_rotations_retirements_and_purges(tmp_path: Path) -> None:
    KeysMachine.path = tmp_path
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    run_state_machine_as_test(
        KeysMachine,
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, print_blob=True, suppress_health_check=checks
        ),
    )
