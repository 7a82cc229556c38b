"""What the fast tier (`make test`) leaves out, the tests in `slow.txt`; `make test-all` runs
everything.

Where one test of a matrix (method x engine x partition) says what ten say, the fast tier keeps the
cases whose id contains one of the given words.
"""

from pathlib import Path

SLOW = set(Path(__file__).with_name("slow.txt").read_text().split())
FEW = ("fedavg", "scaffold", "genfed")
MATRIX = {
    "test_a_site_that_is_away_for_a_moment_is_waited_for": ("train",),
    "test_a_site_whose_answer_came_too_late_goes_on_as_if_it_had_not_worked": ("scaffold",),
    "test_class_shares_stay_at_their_sites": ("calibrated",),
    "test_a_summary_that_somebody_edited_gives_no_traceback": ("options-x",),
    "test_what_ends_a_run_between_checkpoints_loses_no_complete_round": ("1-KeyboardInterrupt",),
    "test_a_bad_answer_costs_its_site_one_round": ("out of memory", "has -3 for samples"),
    "test_around_other_methods": ("compact+scaffold", "genfed+compact"),
    "test_every_mean_and_difference_follows_from_its_seeds": ("helix-gene-fl-gpu",),
    "test_every_cell_of_every_study_is_a_valid_spec": ("quick-helix-genfed", "gpu-gene-fl-table1"),
    "test_nothing_that_leaves_or_stays_holds_the_shares": ("calibrated", "calibrated+scaffold"),
    "test_scaffold_step_by_step_against_a_plain_loop": ("steps",),
    "test_without_strength_it_is_the_inner_method_to_the_bit": ("fedavg",),
    "test_a_site_that_dies_at_any_stage_leaves_the_sum_of_the_others": ("train",),
    "test_nonsense_of_a_site_makes_it_drop_out": ("none",),
    "test_a_client_recovers_from_a_round_that_diverged": ("ditto",),
    "test_a_few_attackers_do_little_harm": ("median",),
    "test_a_hook_that_fails_is_named": ("serial",),
    "test_a_wrapper_counts_in_every_method_or_refuses_it": ("fedavg", "gene-fl", "pfedhn"),
    "test_an_attack_counts_in_every_method_or_is_refused": ("fedavg", "fedlps"),
    "test_an_unseen_client_can_start": (*FEW, "gene-fl", "pfedhn"),
    "test_attacks_on_any_engine": ("ipm",),
    "test_attacks_on_any_method": ("fedper-ipm", "scaffold-ipm"),
    "test_calibrated_clients_are_equal_on_every_engine": ("batched-no-bias",),
    "test_code_runs": ("README.md", "docs/your-own-method.md"),
    "test_downloads_are_counted_and_hold_nothing_personal": (*FEW, "gene-fl"),
    "test_engines_keep_the_same_time": ("batched",),
    "test_engines_train_alike_under_a_shift": ("batched",),
    "test_equal_to_serial_to_the_bit": ("fedavg", "scaffold"),
    "test_every_method_agrees_with_serial": (*FEW, "gene-fl", "ditto", "moon"),
    "test_every_method_computes_what_it_did_in_version_0_1": (*FEW, "gene-fl", "pfedgpa"),
    "test_every_method_takes_newcomers_in_and_resumes_across_their_arrival": ("gene-fl",),
    "test_every_study_of_helix_can_be_set_up": ("quick-helix-genfed", "gpu-helix-gene-fl"),
    "test_genfed_around_methods_whose_clients_keep_a_part": ("fedrep",),
    "test_helix_is_equal_on_every_engine": ("batched",),
    "test_newcomers_are_onboarded_alike": ("gene-fl",),
    "test_odd_runs_are_drawn_too": ("odd2",),
    "test_odd_runs_have_reports_too": ("odd2",),
    "test_only_the_fittest_are_merged": ("serial",),
    "test_only_what_is_declared_travels_and_every_byte_is_counted": (*FEW, "gene-fl", "fedlps"),
    "test_resuming_gives_the_straight_run_to_the_bit": (*FEW, "gene-fl"),
    "test_sites_and_simulation_agree": ("fedavg", "scaffold", "helix"),
}


def is_slow(name: str, case: str) -> bool:
    """Whether a test, with the id of its case, is not for the fast tier."""
    if name in SLOW:
        return True
    return name in MATRIX and not any(word == case or word in case.split() for word in MATRIX[name])
