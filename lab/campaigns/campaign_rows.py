"""The campaigns: a row each, with the command, the file of figures, and the goals of docs/development/campaigns.md.

What a campaign is and what runs stands in ``lab.catalog``; a new one has its goals here.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from lab.catalog import CAMPAIGNS

Compare = Literal["=", "<=", ">=", "shown"]
EACH: Final = ("scenarios", "wrong", "stray", "leaked", "hangs", "deaths")


class Goal(NamedTuple):
    """What a figure must be. ``path``: its keys in the file, ``/`` between them; ``*`` as in file names, all of them."""

    path: str
    compare: Compare
    goal: float | str | None = None


class Row(NamedTuple):
    """A campaign: ``python -m lab target``. ``minutes``: what it takes; ``deadline``: minutes after which it is ended."""

    target: str
    minutes: int
    deadline: int
    result: str = ""
    goals: tuple[Goal, ...] = ()
    root: bool = False

    @property
    def name(self) -> str:
        """As ``ONLY`` has it."""
        return self.target.removeprefix("campaign-")


def zero(*paths: str) -> tuple[Goal, ...]:
    """Each of them must be 0."""
    return tuple(Goal(path, "=", 0) for path in paths)


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
TURNS = (*zero("wrong", "failed"), Goal("conversations", ">=", 300), Goal("pulls/*", "shown"))
GATEWAYS = (*zero("streams/*/failed", "streams/*/wrong", "weights/*/failed"), Goal("streams/*/streams", ">=", 10_000),
            Goal("streams/*/kills", ">=", 5), Goal("streams/*/streams_under_way_at_kills", ">=", 5),
            Goal("first/*/later_us", "<=", 2000), Goal("weights/*/off_percent", "<=", 1.0))
ZERO = (*zero("lost"), Goal("rounds", ">=", 200), Goal("wake_s_max", "<=", 1.5), Goal("started_by_a_wake/1P1D", ">=", 200),
        Goal("wake_s_median", "shown"))
ZERO_CLUSTER = (Goal("*/answered", "shown"), Goal("*/gone", "shown"))
TENANTS = (*zero("failed", "keys_in_the_document"), Goal("tenants", ">=", 50), Goal("routers", ">=", 4),
           Goal("minutes", ">=", 60), Goal("worst_off_percent", "<=", 1.0), Goal("moved_percent", "<=", 5.0))
PLANNER = (Goal("scenarios", ">=", 200), Goal("fewest_of_a_family", ">=", 15),
           Goal("steady_within_half_a_point", ">=", 0.9), Goal("steady_within_two_points", ">=", 0.98),
           Goal("flat_within_a_fifth", ">=", 0.95), Goal("flat_changes_per_h_most", "<=", 4),
           Goal("lost_by_oracle_median", "<=", 1.3), Goal("rivals_within_a_third", ">=", 0.95),
           Goal("fewest_lead_points_of_what_varies", ">=", 0), Goal("starts_worst_points", ">=", -1),
           Goal("regrets_in_a_doubling_most", "<=", 4), Goal("minutes", "<=", 60))

GOALS: Final = {
    "buddy": BUDDY, "pairs": PAIRS, "http": HTTP, "queue": QUEUE, "arm64": ARM64, "files": FILES, "long": LONG,
    "gang": GANG, "kueue": KUEUE, "groups-cluster": GROUPS_CLUSTER, "group-ranks-cluster": RANKS_CLUSTER, "ipv6": IPV6,
    "upgrade": UPGRADE, "fleet": FLEET, "stores": STORES, "speculation": DRAFTS, "sampled": SAMPLED, "unequal": UNEQUAL,
    "models": MODELS, "scenarios": SCENARIOS, "scenarios-models": OF_MODELS, "mixed": MIXED, "router": ROUTER,
    "groups": GROUP_FAULTS, "dp": DP, "scale": SCALE, "away": AWAY,
    "turns": TURNS, "gateways": GATEWAYS, "zero": ZERO, "tenants": TENANTS, "zero-cluster": ZERO_CLUSTER,
    "planner": PLANNER,
}
ROWS: Final = tuple(Row(each.name, each.minutes, 4 * each.minutes + 10, each.result and f"bench/results/{each.result}",
                        GOALS.get(each.name.removeprefix("campaign-"), ()), each.root) for each in CAMPAIGNS)
