"""What the fast tier (`make test`) leaves out; `make test-all` runs everything.

Where one test of a matrix (method x engine x partition) says what ten say, the fast tier keeps the
cases whose id contains one of the given words.
"""

SLOW = {
    "test_a_dead_worker_is_replaced_and_the_second_death_names_the_client",
    "test_a_defence_takes_what_it_is_told",
    "test_a_guided_newcomer_talks_as_often_as_asked",
    "test_a_kill_at_any_moment_leaves_a_run_that_goes_on",
    "test_a_killed_server_goes_on_as_if_nothing_had_happened",
    "test_a_method_from_a_file_reaches_the_workers",
    "test_a_run_across_processes",
    "test_a_run_can_be_audited",
    "test_a_script_without_a_main_guard_works_and_its_violent_end_leaves_nothing",
    "test_a_sweep_is_a_comparison_of_variants",
    "test_after_an_interrupt_nothing_is_left_and_the_engine_works_again",
    "test_an_idle_worker_that_died_is_replaced",
    "test_at_the_optimum_the_duals_are_the_clients_gradients",
    "test_attacks_are_simulated_on_the_server",
    "test_clients_are_better_off_than_with_fedavg_for_a_tenth_of_the_bytes",
    "test_commands_run",
    "test_ctrl_c_ends_with_130_and_the_run_goes_on_as_if_nothing_had_happened",
    "test_direct_generation_knows_no_client_but_looks_like_one",
    "test_engines_end_alike",
    "test_every_study_can_be_set_up_at_every_scale",
    "test_from_a_comparison_to_its_report",
    "test_inversion_stays_in_the_group_and_tells_less_of_the_client",
    "test_it_ends_at_the_optimum_of_the_mean_where_fedavg_does_not",
    "test_it_learns",
    "test_killed_five_times_and_resumed_equals_the_straight_run",
    "test_large_sizes_take_a_step",
    "test_mlflow_reads_what_was_written_and_resumed",
    "test_runs_and_comparisons_go_on_from_any_folder",
    "test_runs_that_go_together_end_as_they_do_alone",
    "test_scaffold_finds_the_minimum_of_the_mean_whatever_the_clients_weigh",
    "test_scripts",
    "test_the_notebook",
    "test_the_number_of_workers_does_not_matter",
    "test_the_papers_uploads_come_out_exactly",
    "test_the_pull_brings_the_clients_features_together",
    "test_the_same_run_gives_the_same_bytes",
    "test_the_server_waits_for_a_newcomer",
    "test_the_wheel_runs_outside_the_source_tree",
    "test_whoever_takes_everybody_is_the_inner_method_to_the_bit",
    "test_wrapped_methods_on_the_command_line",
}
FEW = ("fedavg", "scaffold", "genfed")
MATRIX = {
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
    "test_engines_agree": ("adam",),
    "test_engines_agree_on_parts": ("fedbn",),
    "test_equal_to_serial_to_the_bit": ("fedavg", "scaffold"),
    "test_every_engine_agrees_in_the_end": ("batched",),
    "test_every_method_agrees_with_serial": (*FEW, "gene-fl", "ditto", "moon"),
    "test_every_method_computes_what_it_did_in_version_0_1": (*FEW, "gene-fl", "pfedgpa"),
    "test_every_method_takes_newcomers_in_and_resumes_across_their_arrival": ("gene-fl",),
    "test_every_study_of_helix_can_be_set_up": ("quick-helix-genfed", "gpu-helix-gene-fl"),
    "test_genfed_around_methods_whose_clients_keep_a_part": ("fedrep",),
    "test_helix_is_equal_on_every_engine": ("batched",),
    "test_it_learns_like_fedavg": ("bits=1",),
    "test_it_withstands_four_attackers_of_ten": ("ipm",),
    "test_newcomers_are_onboarded_alike": ("gene-fl",),
    "test_nonsense_in_metadata_does_no_harm": ("[]",),
    "test_odd_runs_are_drawn_too": ("odd2",),
    "test_odd_runs_have_reports_too": ("odd2",),
    "test_only_the_fittest_are_merged": ("serial",),
    "test_only_what_is_declared_travels_and_every_byte_is_counted": (*FEW, "gene-fl", "fedlps"),
    "test_resuming_gives_the_straight_run_to_the_bit": (*FEW, "gene-fl", "pfedgpa"),
    "test_sites_and_simulation_agree": ("fedavg", "scaffold", "helix"),
    "test_two_runs_are_equal_to_the_bit": (*FEW, "gene-fl", "pfedgpa"),
}


def is_slow(name: str, case: str) -> bool:
    """Whether a test, with the id of its case, is not for the fast tier."""
    if name in SLOW:
        return True
    return name in MATRIX and not any(word == case or word in case.split() for word in MATRIX[name])
