"""The campaigns: a row each, with the command, the file of figures, and the goals of docs/development/campaigns.md.

A new one is a row of ``ROWS``. A unit test holds that every ``campaign-…`` of the Makefile has one.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Compare = Literal["=", "<=", ">=", "shown"]
EACH: Final = ("scenarios", "wrong", "stray", "leaked", "hangs", "deaths")


class Goal(NamedTuple):
    """What a figure must be. ``path``: its keys in the file, ``/`` between them; ``*`` as in file names, all of them."""

    path: str
    compare: Compare
    goal: float | str | None = None


class Row(NamedTuple):
    """A campaign: ``make target``. ``minutes``: what it takes; ``deadline``: minutes after which it is ended."""

    target: str
    minutes: int
    deadline: int
    result: str = ""
    goals: tuple[Goal, ...] = ()
    root: bool = False
    so_far: str = ""
    """A file in which it keeps what is done; a campaign that begins anew begins without it."""

    @property
    def name(self) -> str:
        """As ``ONLY`` has it."""
        return self.target.removeprefix("campaign-")


def zero(*paths: str) -> tuple[Goal, ...]:
    """Each of them must be 0."""
    return tuple(Goal(path, "=", 0) for path in paths)


AT = "bench/results/"
ROUTER = (*zero("wrong", "lost_tokens", "duplicated", "aborts_left_behind"), Goal("finished_share", ">=", 0.99),
          Goal("kills_scripted", ">=", 960), Goal("kills_real", ">=", 40), Goal("aborts_scripted", ">=", 9500),
          Goal("aborts_real", ">=", 500))
SAMPLED = (*zero("scripted/none/rejected", "real/rejected"), Goal("scripted/none/streams", ">=", 2000),
           *(Goal(f"scripted/{plant}/rejected", "=", 1) for plant in (
               "sampled again from the last clean token", "temperature lost", "min_tokens not reduced",
               "a penalty without its history")),
           Goal("real/streams", ">=", 1980))
MIXED = (*zero("failures"), Goal("rss_growth_kib", "<=", 4096), Goal("seconds", ">=", 1800))
HTTP = (*zero("desync_hang_or_harm"), Goal("connections", ">=", 20_000))
AWAY = (*zero("failed"), Goal("away_s", ">=", 1800))
UPGRADE = (*zero("upgrade/failed", "upgrade/crossed", "upgrade/faults", "routers/failed", "routers/faults"),
           Goal("upgrade/fewest_ready/*", ">=", 1), Goal("upgrade/requests", ">=", 60), Goal("upgrade/seconds/*", "shown"))
IPV6 = (*zero("failed", "addresses_of_ipv4"), Goal("requests", ">=", 20))
ARM64 = (*zero("digests_that_differ", "compiled_of_another_kind", "routed/failed", "tests/failed"),
         Goal("tests/passed", ">=", 100), Goal("cold_build_s", "shown"))
QUEUE = (*zero("wrong"), Goal("messages", ">=", 1_000_000), Goal("killed", ">=", 40), Goal("overflows", ">=", 1001))
BUDDY = (*zero("overlaps", "not_merged_back"), Goal("operations", ">=", 1_000_000))
PAIRS = (Goal("*/kib_per_peer", "shown"), Goal("*/descriptors_per_peer", "shown"))
LONG = (*zero("wrong"), Goal("prefill_s", ">=", 300), Goal("loaded", "=", 1))
MODELS = (*(Goal(f"*/{order}/{figure}", "=", goal) for order in ("prefill first", "decode first")
            for figure, goal in (("equal", 49),)),
          *(Goal(f"*/{order}/apart", "<=", 1e-4) for order in ("prefill first", "decode first")),
          Goal("*/1500 tokens/blocks_of_a_window_layer", "<=", 3), Goal("*/prefill killed/equal", "=", 1),
          Goal("*/ruined/found_by_sums", "=", 4), Goal("*/ruined/least_apart", ">=", 1e-2),
          Goal("*/decode killed in mid-stream/moved", ">=", 1), Goal("*/clients left/clients", "=", 4))
FILES = (*zero("soft/other", "soft/refused", "hard/other", "hard/other_beside_a_death"), Goal("*/streams", "=", 700),
         Goal("hard/whole", "shown"), Goal("hard/whole_beside_a_death", "shown"))
DRAFTS = (*zero("*/wrong", "mtp 2 to mtp 1, with states/loaded"), Goal("*/within", "=", 1),
          Goal("mtp 2 to mtp 1, with states/refused", ">=", 4), Goal("*/accepted_per_token", "shown"))
STORES = (*zero("*/*/wrong"), Goal("*/one by one/hits_of_prefill", ">=", 1), Goal("*/decode alone/hits_of_decode", ">=", 1),
          Goal("*/version", "shown"))
UNEQUAL = (Goal("*/outcome", "=", "equal"),)
SCENARIOS = (*zero(*(f"summary/{kind}/{what}" for kind in ("scripted", "real") for what in EACH[1:])),
             Goal("summary/scripted/scenarios", ">=", 1000), Goal("summary/real/scenarios", ">=", 1000),
             Goal("summary/real/free_blocks_longest_s/kill -9*", "<=", 5.0),
             Goal("summary/real/free_blocks_longest_s/SIGSTOP*", "<=", 8.0),
             Goal("summary/real/rejoined_longest_s", "<=", 0.6))
OF_MODELS = (*zero(*(f"*/summary/real/{what}" for what in EACH[1:])), Goal("*/summary/real/scenarios", ">=", 500),
             Goal("*/summary/real/free_blocks_longest_s/*", "shown"))
SCALE = (*zero("simulated/faults", "real/failed", "real/wrong", "real/engines_restarted_by_switches"),
         Goal("simulated/steps", ">=", 1000), Goal("real/steps", ">=", 60), Goal("real/switches", ">=", 100),
         Goal("real/idle_switch_s_median", "<=", 2.0))
GROUP_FAULTS = (Goal("*/*/seen", "<=", 10.0), Goal("*/*/alone", "<=", 20.0), Goal("*/*/begun_after", "<=", 30.0),
                Goal("*/*/back", "shown"), Goal("* hang/seen", "<=", 15.0), Goal("* hang/begun_after", "<=", 150.0))
GROUPS_CLUSTER = (*zero("*/failed"), Goal("*/requests", ">=", 10), Goal("a drained node/fewest_groups", "=", 1))
RANKS_CLUSTER = (*zero("*/failed"), Goal("*/requests", ">=", 10))
GANG = (Goal("coscheduling/longest_half_s", "<=", 5.0), Goal("coscheduling/rounds", ">=", 10),
        Goal("alone/longest_half_s", ">=", 5.0), Goal("coscheduling/next_after_s", "shown"))
KUEUE = (Goal("groups/rounds", ">=", 5), Goal("groups/longest_half_s", "<=", 2.0), Goal("groups/next_after_s", "<=", 30.0),
         Goal("*/most_admitted", "<=", 3), Goal("*/back_after_s", "<=", 30.0))
DP = (*zero("soak_*/wrong"), Goal("soak_*/requests", ">=", 10_000), Goal("model: */verdict", "=", "ok"),
      Goal("deaths_in_the_model/ok", "=", 1000), Goal("kills/*/seconds", "<=", 45.0))
FLEET = (*zero("rolls/*/faults"), Goal("rolls/*/share", "<=", 1.0), Goal("fleet", "=", "96P144D"))

ROWS: Final = (
    Row("campaign-buddy", 1, 10, AT + "buddy.json", BUDDY),
    Row("campaign-pairs", 1, 10, AT + "campaign_pairs.json", PAIRS),
    Row("campaign-http", 5, 30, AT + "campaign_http.json", HTTP),
    Row("campaign-queue", 5, 60, AT + "campaign_queue.json", QUEUE, so_far=".cache/campaign_queue.json"),
    Row("campaign-modes", 4, 20),
    Row("campaign-failures", 5, 20),
    Row("campaign-arm64", 10, 40, AT + "campaign_arm64.json", ARM64, root=True),
    Row("campaign-files", 6, 20, AT + "campaign_files.json", FILES),
    Row("campaign-long", 7, 25, AT + "campaign_long.json", LONG),
    Row("campaign-gang", 15, 60, AT + "campaign_gang.json", GANG, root=True),
    Row("campaign-kueue", 20, 75, AT + "campaign_kueue.json", KUEUE, root=True),
    Row("campaign-groups-cluster", 40, 120, AT + "campaign_groups_cluster.json", GROUPS_CLUSTER, root=True),
    Row("campaign-group-ranks-cluster", 20, 90, AT + "campaign_group_ranks_cluster.json", RANKS_CLUSTER, root=True),
    Row("campaign-ipv6", 10, 40, AT + "campaign_ipv6.json", IPV6, root=True),
    Row("campaign-service", 15, 60),
    Row("campaign-upgrade", 30, 90, AT + "campaign_upgrade.json", UPGRADE, root=True),
    Row("mutants", 10, 60),
    Row("campaign-fuzz", 15, 40),
    Row("campaign-fleet", 10, 40, AT + "campaign_fleet.json", FLEET, root=True),
    Row("campaign-stores", 10, 45, AT + "campaign_stores.json", STORES),
    Row("campaign-speculation", 20, 75, AT + "campaign_speculation.json", DRAFTS),
    Row("campaign-sampled", 4, 20, AT + "campaign_sampled.json", SAMPLED),
    Row("campaign-parallel", 10, 40),
    Row("campaign-unequal", 20, 75, AT + "campaign_parallel.json", UNEQUAL),
    Row("campaign-models", 45, 150, AT + "campaign_models.json", MODELS),
    Row("campaign-scenarios", 30, 120, AT + "campaign_scenarios.json", SCENARIOS),
    Row("campaign-scenarios-models", 30, 200, AT + "campaign_scenarios_models.json", OF_MODELS),
    Row("campaign-mixed", 31, 60, AT + "campaign_mixed.json", MIXED),
    Row("campaign-router", 40, 120, AT + "campaign_router.json", ROUTER),
    Row("campaign-groups", 85, 200, AT + "campaign_group_faults.json", GROUP_FAULTS),
    Row("campaign-dp", 60, 180, AT + "campaign_dp.json", DP, so_far=".cache/campaign_dp.json"),
    Row("campaign-scale", 100, 240, AT + "campaign_scale.json", SCALE),
    Row("campaign-away", 45, 90, AT + "campaign_away.json", AWAY, root=True),
)
