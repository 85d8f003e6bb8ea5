"""Hazards of compilers of tensor programs, and which tests show each: public reports on many compilers, sorted by kind."""

import ast
from pathlib import Path

import pytest

HAZARDS = """
1 integers of 8 and 16 bits wrap after each operation: each_integer_wraps_at_its_own_width_after_each_operation
2 integers are divided, shifted and rounded as integers: integers_are_divided_shifted_and_rounded_as_integers,
    the_rounding_of_integers_is_a_tensor_of_its_own
3 the lowest integer, negative operands, division by zero: the_lowest_integer_by_minus_one_wraps,
    shifts_by_negative_numbers_and_beyond_the_width, a_subtraction_of_truth_is_pytorchs_error,
    integer_division_by_zero_is_pytorchs_error
4 an explicit cast to a half rounds: an_explicit_cast_to_a_half_rounds_and_overflows,
    what_a_user_casts_within_autocast_rounds,
    constants_of_halves_are_rounded
5 what backward computes again has forward's bits: what_backward_computes_again_has_forwards_bits
6 floor division and remainder of floats: floor_division_and_remainder_of_floats_are_by_fmod
7 NaN in maxima and activations: nan_wins_in_maxima_and_loses_in_fmax, activations_of_nan_and_infinities
8 negative zero: negative_zero_is_kept_and_lost_as_in_eager
9 literals that a type does not hold: literals_of_any_size, comparisons_with_numbers_beyond_the_dtype
10 reductions of nothing and of one element: reductions_of_nothing, reductions_of_one_element_and_of_no_dimension,
    what_nothing_has_no_value_of_is_pytorchs_error
11 variances: variances_with_any_correction, the_variance_of_what_is_far_from_zero_keeps_its_digits
12 sums in wide types: sums_are_kept_in_wide_types
13 softmax of masked rows: softmax_of_rows
14 gradients at ties and kinks: gradients_at_ties_and_kinks, the_gradient_of_where_beside_a_branch_of_nan
15 promotion: promotion_of_tensors_scalars_and_python_numbers, ranges_in_each_dtype, casts_between_floats_integers_and_truth
16 arguments that a rule does not name: arguments_that_a_rule_does_not_name_are_not_dropped,
    each_overload_of_any_all_max_and_min, additions_with_alpha, bounds_that_are_tensors_and_choices_that_are_numbers
17 types without kernels: types_that_no_kernel_knows_are_left_to_pytorch,
    tensors_that_are_more_than_numbers_are_left_to_pytorch
18 what does not lower is PyTorch's call: calls_without_a_rule_are_pytorchs_and_recorded,
    a_failure_of_lowering_is_one_warning_and_pytorchs_result, a_kernel_that_nvrtc_refuses_is_one_warning_and_pytorchs_result
19 slices: slices_beyond_both_ends_with_steps_and_of_nothing, one_index_narrow_and_scatters_of_slices
20 concatenations and paddings: concatenations_of_empties_of_mixed_types_and_of_many, padding_and_what_reads_it,
    an_index_under_padding_is_not_read
21 views of different factorings: views_of_different_factorings_in_one_kernel,
    dimensions_of_one_squeezed_and_expanded_in_turn
22 strides of results: strides_of_results_and_gradients_are_eagers, strides_that_are_not_dense
23 strides of a call's result that FakeTensors do not know: as_strided_of_what_is_computed_by_kernels_and_by_calls,
    inputs_of_other_strides_than_the_graph_has, as_strided_of_an_input_off_its_storage
24 indices: indices_negative_repeated_and_broadcast, masks_as_indices_that_are_written_through,
    an_index_out_of_range_is_an_error_and_never_a_wild_read, an_embedding_does_not_wrap_negative_indices
25 writes by index with duplicates: writes_by_index_with_duplicates_add_up_and_are_the_same_bits_twice
26 more elements than 32 bits count: more_elements_than_32_bits_count
27 addresses off 16 bytes: inputs_at_any_address_read_and_written, expanded_and_overlapping_inputs_at_odd_addresses,
    views_that_calls_return_at_odd_addresses, results_of_calls_off_16_bytes
28 inputs that are written: inputs_written, inputs_of_any_layout_are_written, inputs_of_one_element_are_written,
    running_statistics_of_one_channel
29 inputs that share memory: two_inputs_in_one_storage_and_the_same_tensor_twice,
    compiled_again_when_inputs_begin_to_share_memory
30 copies of written inputs are written back: written_inputs_of_training_are_copied_back_where_they_were_copied,
    inputs_off_16_bytes_are_copied_there_and_back
31 outputs of every kind: outputs_that_are_inputs_views_equal_values_constants_and_no_tensors,
    gradients_through_outputs_that_are_views
32 buffers, counters and caches: buffers_counters_and_caches, an_optimizer_compiled_with_its_state,
    written_inputs_get_values_and_versions
33 values saved for backward: what_backward_needs_is_not_computed_again_from_an_input_that_is_written,
    a_saved_value_changed_before_backward_is_eagers_error, backward_twice_hooks_and_gradients_of_any_layout,
    gradients_of_no_size, values_of_written_inputs_through_views_and_chains_are_kept_for_backward
34 modes of autograd inside: modes_of_autograd_inside
35 views of another type, equal parameters: views_of_another_type_are_read_before_their_base_is_written,
    views_that_calls_make_are_read_before_their_base_is_written, equal_parameters_and_constants_are_not_one
36 randomness: a_seed_gives_eagers_numbers_and_each_call_others
37 checkpoints and budgets of memory: a_checkpoint_computes_again_with_forwards_state, a_selective_checkpoint,
    any_budget_of_memory_gives_the_same_gradients
38 sizes and numbers that change: sizes_of_0_1_and_2_after_large_ones, inputs_whose_sizes_meet_and_broadcast,
    python_numbers_and_lists_that_change
39 sizes that data decides: sizes_and_scalars_that_data_decides
40 dynamic sizes: dynamic_sizes_in_shapes_ranges_pads_means_and_gradients
41 operators with bodies: cond_runs_the_branch_that_data_says, while_loops_run, maps_and_scans_run,
    autograd_functions_keep_their_backward, custom_operators_that_write_their_arguments, transforms_of_functions
42 autocast, scalers and tied weights: autocast_on_off_and_nested_with_a_weight_used_twice, autocast_and_a_scaler,
    tied_weights_get_one_gradient
43 exceptions, threads, forks and resets: a_failed_call_leaves_all_as_it_was_and_the_next_is_right,
    graph_breaks_and_exceptions_inside, threads_compile_and_run_at_once,
    a_fork_runs_what_was_compiled_before_and_compiles_anew, a_reset_forgets_and_compiles_again
44 CUDA graphs: the_first_output_kept_over_a_step_is_an_error_and_its_clone_is_not, outputs_that_are_fed_back,
    a_new_generation_begins_after_backward_and_after_inference, each_replay_draws_other_numbers,
    each_replay_of_training_draws_one_mask_for_forward_and_backward
45 parallel training: two_processes_of_data_parallel_training, compiled_autograd, views_into_one_flat_parameter,
    parameters_that_are_views_of_one_storage_at_odd_addresses
46 the same bits twice: the_same_bits_twice_and_no_refusal_of_the_deterministic_mode
"""


def entries():
    """(hazard, names of its tests)."""
    lines = HAZARDS.replace(",\n    ", ", ").strip().splitlines()
    return [
        (hazard, [f"test_{name}" for name in names.split(", ")]) for hazard, names in (ln.split(": ") for ln in lines)
    ]


@pytest.fixture(scope="module")
def functions():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("test_*.py")]
    return {one.name for tree in trees for one in tree.body if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("hazard,tests", [pytest.param(*one, id=one[0]) for one in entries()])
def test_a_hazard_has_tests(hazard, tests, functions):
    assert set(tests) <= functions


def test_hazards_are_numbered():
    assert [int(hazard.split()[0]) for hazard, _ in entries()] == list(range(1, 47))
