import pytest

from hearth.errors import ConfigError, EngineError, NotFoundError
from hearth.sdk import DeploymentManager, SaveResult, WeightSyncer

BASE = "accounts/fireworks/models/tiny"
NAME = "accounts/me/deployments/d"
HOT_LOAD = "/hot_load/v1/models/hot_load"


def replica(current, *, target=None, stage="idle", error=None, version=0, adapters=()):
    return {
        "current_snapshot_identity": current,
        "readiness": True,
        "loading_state": {
            "stage": stage,
            "target_snapshot_identity": target,
            "error_message": error,
        },
        "loaded_adapters": [{"identity": adapter, "status": "loaded"} for adapter in adapters],
        "weight_version": version,
    }


class Serving:
    """A deployment that serves whatever it is given, but for the identities in ``refused``."""

    def __init__(self, peer, answer, current=None) -> None:
        self.answer = answer
        self.state = replica(current)
        self.refused: set[str] = set()
        self.version = 0
        self.orders: list[dict] = []
        peer.handle("POST", HOT_LOAD, self.order)
        peer.handle("GET", HOT_LOAD, self.look)

    async def order(self, seen):
        identity = seen.body["identity"]
        self.orders.append(seen.body)
        served = self.state["current_snapshot_identity"]
        if identity in self.refused:
            self.state = replica(
                served, target=identity, stage="error", error="checksum of 'w' differs"
            )
        else:
            self.version += 1
            self.state = replica(identity, target=identity, stage="done", version=self.version)
        return self.answer({})

    async def look(self, seen):
        return self.answer({"replicas": [self.state]})


class Plain:
    """The side that holds the weights, with nothing but the one method."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def save_weights_for_sampler_ext(self, name, checkpoint_type="base"):
        self.kinds.append(checkpoint_type)
        return SaveResult(path=name, snapshot_name=f"{name}-1a2b3c4d")


class Policy(Plain):
    """One that says its rank; full parameters unless told otherwise."""

    def __init__(self, lora_rank: int = 0) -> None:
        super().__init__()
        self.lora_rank = lora_rank


@pytest.fixture
def serving(peer, answer) -> Serving:
    return Serving(peer, answer)


@pytest.fixture
def manager(peer, quick) -> DeploymentManager:
    return DeploymentManager(api_key="key", base_url=peer.url, **quick)


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
def syncer(manager):
    def make(policy, **options) -> WeightSyncer:
        return WeightSyncer(
            policy_client=policy,
            deploy_mgr=manager,
            deployment_id="d",
            base_model=BASE,
            hotload_timeout=5,
            **options,
        )

    return make


def predecessors(serving) -> list[str | None]:
    metadata = [order.get("incremental_snapshot_metadata") for order in serving.orders]
    return [given and given["previous_snapshot_identity"] for given in metadata]


def test_full_parameters_send_a_base_first_and_then_deltas_on_what_is_served(
    serving, syncer, policy
):
    sync = syncer(policy, first_checkpoint_type="base")

    identities = [sync.save_and_hotload(f"step-{step:05d}") for step in (1, 2, 3)]

    assert policy.kinds == ["base", "delta", "delta"]
    assert [order["identity"] for order in serving.orders] == identities
    assert predecessors(serving) == [None, *identities[:2]]
    assert sync.version == 3


def test_an_adapter_is_sent_merged_at_every_sync(serving, syncer):
    policy = Policy(lora_rank=8)
    sync = syncer(policy, first_checkpoint_type="merged_base")
    sync.save_and_hotload("step-1")
    sync.reset_delta_chain()
    sync.save_and_hotload("step-2")

    assert policy.kinds == ["merged_base"] * 2


def test_direct_syncs_are_whole_also_after_one_was_refused(serving, syncer, policy):
    sync = syncer(policy, first_checkpoint_type="direct")
    sync.save_and_hotload("step-1")
    sync.save_and_hotload("step-2")
    sync.reset_delta_chain()
    sync.save_and_hotload("step-3")

    assert policy.kinds == ["direct"] * 3
    assert predecessors(serving) == [None] * 3


def test_lora_always_sends_its_whole_adapter(serving, syncer):
    policy = Policy(lora_rank=8)
    sync = syncer(policy)

    for step in (1, 2, 3):
        sync.save_and_hotload(f"step-{step}")

    assert policy.kinds == ["base", "base", "base"]
    assert predecessors(serving) == [None, None, None]


def test_the_rank_of_a_policy_that_has_none_may_be_told(serving, syncer):
    plain, reported = Plain(), Plain()
    for policy, options in ((plain, {}), (reported, {"lora_rank": 4})):
        sync = syncer(policy, **options)
        sync.save_and_hotload("a")
        sync.save_and_hotload("b")

    assert plain.kinds == ["base", "delta"]
    assert reported.kinds == ["base", "base"]


def test_after_a_failed_load_the_next_snapshot_is_a_base(serving, syncer, policy):
    sync = syncer(policy)
    sync.save_and_hotload("step-1")
    serving.refused.add("step-2-1a2b3c4d")

    with pytest.raises(EngineError, match="checksum of 'w' differs") as failure:
        sync.save_and_hotload("step-2")
    sync.save_and_hotload("step-3")
    sync.save_and_hotload("step-4")

    assert policy.kinds == ["base", "delta", "base", "delta"]
    assert predecessors(serving)[2] is None
    text = str(failure.value)
    assert "'step-2-1a2b3c4d'" in text
    assert "still serves 'step-1-1a2b3c4d'" in text
    assert "next snapshot as a base" in text
    assert "reattach_trainer" in text


def test_a_snapshot_that_was_saved_but_not_served_is_no_predecessor(serving, syncer, policy):
    sync = syncer(policy)
    sync.save_and_hotload("step-1")

    sync.save_only("step-2")
    sync.save_and_hotload("step-3")

    assert policy.kinds == ["base", "delta", "base"]


def test_saving_and_serving_may_be_two_calls(serving, syncer, policy):
    sync = syncer(policy)
    sync.save_and_hotload("step-1")

    identity = sync.save_only("step-2")
    assert len(serving.orders) == 1
    sync.hotload(identity)

    assert policy.kinds == ["base", "delta"]
    assert predecessors(serving) == [None, "step-1-1a2b3c4d"]


def test_the_chain_may_be_reset_by_hand_even_when_it_began_with_a_delta(serving, syncer, policy):
    sync = syncer(policy, first_checkpoint_type="delta")
    sync.save_and_hotload("step-1")

    sync.reset_delta_chain()
    sync.save_and_hotload("step-2")

    assert policy.kinds == ["delta", "base"]


def test_a_deployment_with_a_stale_snapshot_is_first_given_a_whole_one(peer, answer, syncer):
    serving = Serving(peer, answer, current="another-run")

    syncer(Policy()).save_and_hotload("step-1")

    assert predecessors(serving) == [None]


def test_a_deployment_without_a_replica_is_waited_for(peer, answer, syncer):
    empty, there = answer({"replicas": []}), answer({"replicas": [replica(None)]})
    peer.on("GET", HOT_LOAD, empty, answer(status=425), answer(status=503), there)
    peer.on("GET", f"/v1/{NAME}", answer({"baseModel": BASE, "state": "CREATING"}))

    state = syncer(Policy()).wait_for_hotload_ready(timeout=5)

    assert state.current_snapshot_identity is None
    assert len(peer.requests("GET", HOT_LOAD)) == 4


def test_a_deployment_that_gets_no_replica_is_named(peer, answer, syncer):
    peer.on("GET", HOT_LOAD, answer({"replicas": []}))

    with pytest.raises(EngineError, match=r"deployments/d must have a replica within 0\.05 s"):
        syncer(Policy()).wait_for_hotload_ready(timeout=0.05)


def test_a_first_type_that_there_is_not_or_that_an_adapter_would_ignore_is_refused(syncer):
    with pytest.raises(ConfigError, match="'merged'"):
        syncer(Policy(), first_checkpoint_type="merged")
    with pytest.raises(ConfigError, match="must be 'base' for an adapter, got 'direct'"):
        syncer(Policy(lora_rank=8), first_checkpoint_type="direct")
    with pytest.raises(ConfigError, match="got 'merged_base': there is no adapter to merge"):
        syncer(Policy(), first_checkpoint_type="merged_base")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, {}),
        ({"running_requests": "drain"}, {}),
        ({"running_requests": "keep"}, {"running_requests": "keep"}),
    ],
    ids=["unset", "drain", "keep"],
)
def test_only_the_wish_to_keep_what_runs_is_sent(serving, syncer, manager, options, said):
    identity = syncer(Policy(), **options).save_and_hotload("step-1")
    manager.hotload("d", BASE, "step-2", **options)

    assert serving.orders == [
        {"identity": name, "reset_prompt_cache": True} | said for name in (identity, "step-2")
    ]


def test_any_other_wish_for_running_requests_is_refused(serving, syncer, manager):
    rule = "running_requests must be 'drain' or 'keep', got 'freeze'"

    with pytest.raises(ConfigError, match=rule):
        syncer(Policy(), running_requests="freeze")
    with pytest.raises(ConfigError, match=rule):
        manager.hotload_and_wait("d", BASE, "step-1", running_requests="freeze")

    assert serving.orders == []


@pytest.fixture
def states(peer, answer):
    """Take every order for a snapshot and answer with these states in turn."""

    def script(*replicas) -> None:
        peer.on("POST", HOT_LOAD, answer({}))
        peer.on("GET", HOT_LOAD, *(answer({"replicas": [state]}) for state in replicas))

    return script


def test_a_restart_in_the_middle_is_survived_by_asking_again(peer, answer, states, manager):
    loading = replica("old", target="new", stage="loading")
    done = replica("new", target="new", stage="done", version=7)
    states(loading, replica("old"), loading, done)
    peer.on("POST", HOT_LOAD, *(answer(status=status) for status in (200, 404, 425, 503, 200)))
    peer.on("GET", f"/v1/{NAME}", answer({"baseModel": BASE, "state": "UPDATING"}))

    state = manager.hotload_and_wait("d", BASE, "new", timeout_s=10)

    assert state.weight_version == 7
    orders = peer.requests("POST", HOT_LOAD)
    assert [order.body["identity"] for order in orders] == ["new"] * 5
    assert orders[0].headers["fireworks-deployment"] == NAME
    assert orders[0].headers["fireworks-model"] == BASE


def test_a_load_that_takes_its_time_is_ordered_once(peer, states, manager):
    loading = replica("old", target="new", stage="loading")
    states(*[loading] * 5, replica("new", target="new", stage="done"))

    manager.hotload_and_wait("d", BASE, "new", timeout_s=10)

    assert len(peer.requests("POST", HOT_LOAD)) == 1
    assert peer.requests("GET", HOT_LOAD)[0].query["wait_for"] == "new"


def test_an_adapter_that_is_loaded_counts_as_served(states, manager):
    states(replica("base", adapters=["new"]))

    assert manager.hotload_and_wait("d", BASE, "new").loaded_adapters[0].identity == "new"


def test_an_error_about_another_snapshot_is_stale(states, manager):
    states(replica("old", target="other", stage="error", error="bad"), replica("new"))

    assert manager.hotload_and_wait("d", BASE, "new").current_snapshot_identity == "new"


def test_a_load_that_takes_too_long_says_what_is_served_and_what_to_do(states, manager):
    states(replica("old", target="new", stage="loading"))

    message = r"'new' must be served within 0\.05 s, still 'old' .*reattach_trainer"
    with pytest.raises(EngineError, match=message):
        manager.hotload_and_wait("d", BASE, "new", timeout_s=0.05)


def test_a_deployment_that_failed_for_good_is_not_waited_for(peer, answer, manager):
    peer.on("POST", HOT_LOAD, answer(status=503))
    failed = {"baseModel": BASE, "state": "FAILED", "statusMessage": "out of memory"}
    peer.on("GET", f"/v1/{NAME}", answer(failed))

    with pytest.raises(EngineError, match="FAILED: out of memory"):
        manager.hotload_and_wait("d", BASE, "new", timeout_s=60)


def test_a_deployment_that_does_not_exist_is_not_waited_for(manager):
    with pytest.raises(NotFoundError):
        manager.hotload_and_wait("nope", BASE, "new", timeout_s=60)


def test_an_order_may_be_left_to_itself_and_looked_after(serving, manager):
    manager.hotload("d", BASE, "new")

    assert serving.orders[0] == {"identity": "new", "reset_prompt_cache": True}
    assert manager.hotload_check_status("d", BASE).replicas[0].weight_version == 1
    state = manager.replica_state("d", BASE)
    assert state.current_snapshot_identity == "new"
