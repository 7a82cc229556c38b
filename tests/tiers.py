"""What the fast tier (`make test`) leaves out; `make test-all` runs everything.

Where one test of a matrix (method x engine x partition) says what ten say, the fast tier keeps the
cases whose id contains one of the given words.
"""

SLOW = {
    "test_a_killed_server_goes_on_as_if_nothing_had_happened",
    "test_a_kill_at_any_moment_leaves_a_run_that_goes_on",
    "test_a_run_across_processes",
    "test_a_script_without_a_main_guard_works_and_its_violent_end_leaves_nothing",
    "test_after_an_interrupt_nothing_is_left_and_the_engine_works_again",
    "test_an_idle_worker_that_died_is_replaced",
    "test_commands_run",
    "test_ctrl_c_ends_with_130_and_the_run_goes_on_as_if_nothing_had_happened",
    "test_killed_five_times_and_resumed_equals_the_straight_run",
    "test_scripts",
    "test_the_notebook",
    "test_the_wheel_runs_outside_the_source_tree",
}
FEW = ("fedavg", "scaffold", "genfed")
MATRIX = {
    "test_a_few_attackers_do_little_harm": ("median",),
    "test_a_hook_that_fails_is_named": ("serial",),
    "test_a_wrapper_counts_in_every_method_or_refuses_it": ("fedavg", "gene-fl", "pfedhn"),
    "test_an_attack_counts_in_every_method_or_is_refused": ("fedavg", "fedlps"),
    "test_an_unseen_client_can_start": (*FEW, "gene-fl", "pfedhn"),
    "test_attacks_on_any_engine": ("ipm",),
    "test_attacks_on_any_method": ("fedper-ipm", "scaffold-ipm"),
    "test_downloads_are_counted_and_hold_nothing_personal": (*FEW, "gene-fl"),
    "test_equal_to_serial_to_the_bit": ("fedavg", "scaffold"),
    "test_every_method_agrees_with_serial": (*FEW, "gene-fl", "ditto", "moon"),
    "test_every_method_computes_what_it_did_in_version_0_1": (*FEW, "gene-fl", "pfedgpa"),
    "test_every_method_takes_newcomers_in_and_resumes_across_their_arrival": ("gene-fl",),
    "test_genfed_around_methods_whose_clients_keep_a_part": ("fedrep",),
    "test_only_what_is_declared_travels_and_every_byte_is_counted": (*FEW, "gene-fl", "fedlps"),
    "test_resuming_gives_the_straight_run_to_the_bit": (*FEW, "gene-fl", "pfedgpa"),
    "test_sites_and_simulation_agree": ("fedavg", "scaffold"),
    "test_two_runs_are_equal_to_the_bit": (*FEW, "gene-fl", "pfedgpa"),
}


def is_slow(name: str, case: str) -> bool:
    """Whether a test, with the id of its case, is not for the fast tier."""
    if name in SLOW:
        return True
    return name in MATRIX and not any(word == case or word in case.split() for word in MATRIX[name])
