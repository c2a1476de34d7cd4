//! One suite for every store. A case is a function over any store; the macros run each case on the
//! model in memory, on SQLite and on PostgreSQL. New semantics begin here, as a failing case.

mod admin_records;
mod alert_records;
mod answering;
mod cases;
mod circuits;
mod clock;
mod deliveries;
mod endpoint_history;
mod endpoints;
mod event_plans;
mod expiring;
mod gaps;
mod guards;
#[allow(dead_code)]
mod harness;
mod jobs;
mod key_order;
mod ledger;
mod ledger_plans;
mod lists;
mod operator_actions;
mod order;
mod outbox_reads;
mod own_messages;
mod plans;
mod portal_links;
mod pruned;
mod publishing;
mod redis_ledger;
mod rejections;
mod replay_plans;
mod search_index;
#[allow(dead_code)]
mod sending;
mod sending_plans;
mod source_secrets;
mod sql_handlers;
mod stats;
mod tenant_deletion;
mod verifiers;
mod work_plans;

macro_rules! on_every_store {
    ($($case:ident),* $(,)?) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $case() {
                crate::cases::$case(std::sync::Arc::new(hapax_store::MemoryStore::new())).await;
            })*
        }
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $case() {
                let place = crate::harness::DatabaseDirectory::new();
                crate::cases::$case(std::sync::Arc::new(place.open())).await;
            })*
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $case() {
                let store = crate::harness::on_postgres().await;
                crate::cases::$case(std::sync::Arc::clone(&store)).await;
                store.close().await;
            })*
        }
    };
}

on_every_store! {
    a_new_event_is_accepted_and_its_copy_is_a_duplicate_with_the_same_id,
    a_thousand_copies_at_once_have_one_winner,
    the_same_id_of_another_tenant_or_source_is_another_event,
    the_same_id_with_another_body_is_a_conflict_and_both_are_kept,
    a_body_of_several_events_is_taken_whole_and_its_elements_are_known_again_elsewhere,
    the_same_id_twice_in_one_body_is_one_event,
    a_late_event_waits_for_review_and_an_on_time_copy_promotes_it_once,
    a_late_copy_of_a_known_event_is_a_duplicate,
    signed_bytes_under_another_id_go_to_review_and_no_copy_promotes_them,
    a_derived_key_with_another_body_goes_to_review_under_a_key_of_its_own,
    equal_derived_keys_are_one_event_only_within_their_span,
    a_copy_in_the_next_span_may_be_decided_first,
    copies_are_counted_and_the_newest_few_kept_in_full,
    a_list_pages_from_new_to_old_and_filters,
    an_event_is_found_by_either_id_and_an_ambiguous_one_is_said_to_be,
    a_key_is_known_once_its_event_is_there,
    a_session_is_known_until_it_is_ended,
    sessions_that_have_ended_are_deleted_with_the_next_one,
    the_audit_trail_is_read_from_new_to_old_in_pages,
    a_code_works_once_and_its_session_belongs_to_its_link,
    of_twenty_that_use_one_code_one_enters,
    a_link_that_has_ended_lets_nobody_in_and_is_deleted_with_the_next_one,
    revoking_ends_every_link_of_one_tenant,
    a_list_has_every_link_that_has_not_ended,
    the_links_of_a_tenant_go_with_its_data,
    a_tenant_has_at_most_so_many_pings_in_a_minute,
    the_newest_rejections_of_each_source_are_kept,
    an_arrival_names_what_verified_it,
}

/// Runs each case about jobs and sending on every store. These cases need a clock, so each gets its
/// own world.
macro_rules! on_every_working_store {
    ($($about:ident { $($case:ident),* $(,)? })*) => {
        mod memory_at_work {
            $(mod $about {
                $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() {
                    crate::$about::$case(crate::harness::World::in_memory()).await;
                })*
            })*
        }
        mod sqlite_at_work {
            $(mod $about {
                $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() {
                    crate::$about::$case(crate::harness::World::on_disk()).await;
                })*
            })*
        }
        mod postgres_at_work {
            $(mod $about {
                $(#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() {
                    crate::$about::$case(crate::harness::World::on_postgres().await).await;
                })*
            })*
        }
    };
}

on_every_working_store! {
    stats {
        each_lane_says_how_far_behind_it_is,
        a_lane_that_no_node_knows_is_listed_as_well,
        an_expired_lease_is_work_that_is_due,
        events_that_wait_for_a_decision_are_counted_by_source,
        counting_a_backlog_stops_at_the_cap,
        dead_letters_are_counted_by_error_over_all_of_them,
        unfinished_events_came_before_and_have_not_ended,
        a_page_of_unfinished_events_is_full_although_others_lie_between,
        a_sample_holds_the_events_of_a_span_that_came_more_than_once_and_when,
        a_large_span_is_sampled_evenly,
        the_space_that_a_store_occupies_adds_up,
        traffic_is_added_up_and_becomes_coarser_without_losing_a_count,
    }
    search_index {
        an_indexed_value_finds_its_events_however_many_lie_between,
        other_fields_index_old_events_again,
        exact_matches_come_first_and_each_event_once,
        a_search_finds_what_it_may_ask_for_and_nothing_else,
        a_pruned_event_is_not_found_by_its_values,
        calls_that_index_at_once_leave_out_no_event,
        an_event_is_found_by_the_id_of_a_request_or_a_message,
        events_with_a_value_are_counted_up_to_a_bound,
    }
    lists {
        a_search_over_several_pages_finds_each_match_once,
        events_that_come_during_a_search_are_not_in_it,
        jobs_are_searched_in_bounded_pages,
        messages_and_deliveries_are_searched_in_bounded_pages,
        a_list_of_a_time_begins_near_it,
        a_list_of_a_time_is_whole_after_the_clock_was_set_back,
        a_result_stays_when_its_page_is_full_and_the_bound_is_reached,
    }
    jobs {
        a_job_is_written_with_its_event_and_only_once,
        every_event_of_one_body_has_its_own_job,
        a_duplicate_gets_the_outcome_of_the_work,
        a_result_is_a_line_not_a_document,
        the_answer_of_the_app_is_kept_with_its_attempt,
        a_job_that_the_app_completed_is_done_although_its_answer_says_failed,
        two_handlers_have_their_own_jobs_retries_and_dead_letters,
        only_announced_handlers_are_claimed,
        a_claim_counts_before_the_work,
        jobs_come_in_due_order_and_then_in_the_order_of_arrival,
        the_first_attempt_waits_as_well_where_the_schedule_says_so,
        jobs_that_came_together_do_not_begin_together,
        a_late_worker_cannot_settle_a_reclaimed_job,
        a_slow_worker_is_still_done_until_the_next_claim,
        done_is_terminal_and_idempotent_under_its_fence,
        failed_attempts_follow_the_schedule_and_then_the_job_dies,
        an_error_and_a_result_have_the_same_bound_on_every_store,
        a_failure_may_set_the_next_attempt_or_forbid_it,
        an_expired_lease_is_claimable_again_and_counted_as_lost,
        a_job_that_was_lost_is_claimed_alone_from_then_on,
        jobs_that_were_lost_together_do_not_come_due_together,
        a_job_lost_alone_five_times_is_buried_by_the_claim,
        a_lost_call_is_neither_claimed_alone_nor_buried,
        a_guessed_fence_settles_nothing,
        a_request_that_was_never_sent_uses_no_step,
        a_job_given_back_is_uncounted,
        a_hurried_event_is_due_at_once_and_nothing_else_is,
        renewing_extends_the_lease_of_its_holder,
        a_noisy_tenant_does_not_starve_the_others,
        a_lost_job_gets_its_turn_beside_a_backlog_of_others,
        a_hopeless_job_is_buried_at_once_and_says_why,
        messages_are_published_with_done_or_not_at_all,
        a_message_that_names_no_tenant_is_of_its_events,
        a_waiting_worker_is_notified_of_new_jobs,
        jobs_are_listed_from_new_to_old_and_filtered,
        sql_work_is_claimed_and_done_in_one_step,
        sql_work_that_was_lost_is_handed_out_by_itself_and_not_begun,
        events_that_sql_work_ended_are_named,
        a_claim_says_how_many_attempts_failed_before_it,
        a_claimed_job_is_run_by_itself_under_its_fence_and_once,
    }
    ledger {
        operators_read_keys_in_pages_and_find_one,
        a_deleted_key_is_new_again_and_one_that_runs_is_not_deleted,
        of_fifty_concurrent_requests_one_runs,
        a_replay_is_the_answer_as_it_was_given,
        another_request_under_the_same_key_is_a_mismatch_whatever_became_of_the_first,
        the_same_key_in_another_scope_is_another_key,
        a_waiting_request_gets_the_longest_wait,
        a_lease_that_ran_out_is_taken_over_and_the_old_right_is_void,
        of_fifty_that_find_a_lease_over_one_takes_it,
        a_late_answer_counts_while_no_other_attempt_runs,
        a_late_answer_beside_a_takeover_has_one_winner,
        an_answer_is_kept_once_per_fence,
        an_abandoned_key_is_free_and_a_finished_one_cannot_be_abandoned,
        effects_of_an_earlier_attempt_are_not_forgotten_with_a_later_one,
        a_key_past_its_ttl_is_as_good_as_new,
        pruning_forgets_what_is_past_its_ttl_and_nothing_else,
        no_fence_comes_twice,
        a_caller_keeps_as_many_keys_as_its_quota_says_and_known_ones_are_never_refused,
        of_fifty_new_keys_at_once_as_many_run_as_there_is_room_for,
        whatever_ends_a_key_gives_its_place_back,
        a_caller_with_too_many_bytes_keeps_no_more_answers_and_nothing_runs_again,
        over_the_total_only_callers_above_their_fair_share_are_refused,
        callers_have_quotas_of_their_own,
    }
    order {
        latest_makes_older_versions_stale_and_lets_ties_and_gaps_run,
        the_mark_moves_only_with_done,
        two_handlers_keep_their_own_marks,
        one_at_a_time_per_resource_while_others_go_on,
        jobs_of_a_busy_resource_hide_no_job_of_a_free_one,
        waiting_older_versions_do_not_delay_the_newest,
        an_expired_lease_frees_its_resource,
        a_waiting_worker_is_notified_when_a_resource_is_free,
        no_job_stays_parked_behind_one_that_became_stale,
        a_handler_that_keeps_no_order_any_more_lets_all_go,
        shuffled_versions_end_in_the_newest_state,
        a_sequence_holds_what_is_past_a_gap_and_runs_in_order_when_filled,
        a_failing_or_dead_number_is_a_gap,
        a_job_at_or_below_the_mark_is_stale_unless_an_operator_forces_it,
        a_dead_job_that_was_overtaken_is_stale_when_replayed,
        a_sequence_without_a_start_begins_with_what_is_claimed_first,
        a_claimed_job_has_its_resource_for_itself_and_moves_its_mark,
        a_claimed_job_that_was_overtaken_while_it_waited_does_nothing,
        an_overtaken_job_is_stale_at_once_and_blocks_no_other,
        a_look_that_sets_a_job_aside_is_no_attempt,
    }
    gaps {
        a_gap_held_too_long_goes_to_review_and_can_be_approved,
        a_busy_resource_does_not_extend_the_holds_of_others,
        a_rejected_job_never_runs_unless_forced,
        a_late_number_leaves_jobs_in_review_to_the_operator,
        a_gap_held_too_long_is_left_behind_where_going_on_is_allowed,
        a_retry_that_comes_after_the_gap_was_left_is_stale,
        a_job_at_work_or_due_is_no_gap,
        beyond_hold_max_the_newest_go_to_review,
        a_handler_that_had_no_job_yet_is_forced_too,
        a_forced_job_keeps_its_resource_and_moves_no_mark_back,
        a_worker_that_lost_its_lease_cannot_settle_what_was_passed,
        a_machine_runs_allowed_steps_and_nothing_else,
        a_machine_goes_past_a_gap_in_its_own_order,
        a_step_of_a_machine_may_be_let_run_by_an_operator,
        a_machine_that_moved_on_does_not_take_a_late_worker_s_word,
        sql_work_keeps_to_deadlines_and_decisions_too,
        an_event_discarded_for_one_handler_is_kept_while_another_needs_it,
        a_hopeless_job_is_not_run_by_a_replay,
    }
    guards {
        a_suspected_replay_leaves_its_id_to_the_event_that_it_belongs_to,
        forged_copies_beside_the_genuine_event_never_keep_it_from_running,
        signed_content_is_one_event_under_any_derived_key,
        of_many_ids_at_once_one_has_the_guard,
        an_attempt_with_another_number_is_a_copy_and_not_a_conflict,
        a_conflict_promotes_no_late_event_of_a_sender_that_counts,
        a_suspected_replay_waits_for_review_however_often_it_comes,
        content_that_ran_promotes_no_late_event_of_another_id,
        a_rejected_event_does_not_come_back_under_another_id,
        a_copy_that_was_signed_again_is_guarded_too,
        a_guard_outlives_the_body_and_a_key_that_is_kept_for_less,
        a_guard_without_a_signed_time_is_kept_as_long_as_the_key,
    }
    pruned {
        replay_of_a_pruned_event_does_nothing,
        replays_beside_pruning_run_nothing_twice,
        a_mark_is_forgotten_once_no_older_event_can_arrive_or_be_replayed,
        a_mark_stays_while_anything_older_is_unfinished,
        a_mark_stays_where_the_next_event_needs_it_or_keys_are_kept_for_ever,
        messages_go_with_the_history_of_their_time,
    }
    operator_actions {
        approving_beside_on_time_copies_writes_the_jobs_once,
        a_paused_handler_claims_nothing_and_loses_nothing,
        a_hold_does_not_end_while_its_handler_is_paused,
        rejecting_beside_on_time_copies_has_one_winner,
        an_approved_event_records_its_operator,
        a_rejected_event_never_runs,
        replaying_a_done_job_does_nothing_without_force,
        replaying_a_dead_job_runs_it_again_with_a_fresh_schedule,
        a_job_that_was_lost_still_comes_alone_when_it_is_replayed,
        replaying_an_open_job_leaves_it_as_it_is,
        a_dead_letter_is_discarded_by_an_operator_and_can_then_be_pruned,
        replaying_a_job_that_waits_for_its_next_attempt_runs_it_now,
        a_handler_added_later_gets_a_job_by_replay,
        a_dry_run_says_what_would_happen_and_changes_nothing,
        pruning_takes_what_is_finished_and_past_its_horizon,
        pruning_takes_ranges_and_leaves_what_lies_between,
        an_event_of_the_future_does_not_keep_the_events_after_it,
    }
    publishing {
        the_same_message_again_is_a_duplicate_and_other_content_is_a_conflict,
        the_same_id_of_another_tenant_is_another_message,
        of_a_thousand_publishes_of_one_id_one_wins,
        a_message_without_an_id_gets_one_that_no_other_has,
        the_endpoints_that_want_a_message_when_it_is_published_get_it,
        an_endpoint_gets_the_bytes_that_were_published,
        messages_of_one_key_are_numbered_in_the_order_of_their_commits,
        messages_of_a_job_are_sent_with_its_done_or_not_at_all,
        messages_of_a_job_go_to_the_tenant_of_its_event,
        a_waiting_sender_is_notified_of_new_deliveries,
        a_message_with_an_open_or_dead_delivery_is_not_pruned,
        the_id_of_a_pruned_message_is_known_until_its_horizon,
        a_job_that_publishes_other_content_under_a_used_id_fails,
    }
    deliveries {
        a_claim_commits_its_attempt_and_fence_before_the_request,
        a_delivered_message_keeps_the_attempt_and_is_never_claimed_again,
        an_exchange_settles_and_claims_in_one_commit,
        a_late_sender_cannot_settle_a_reclaimed_delivery,
        an_expired_lease_is_a_lost_attempt_that_uses_no_step,
        deliveries_that_were_lost_together_do_not_come_due_together,
        each_act_that_may_end_claims_is_counted_before_its_answer,
        a_late_delivered_counts_and_a_late_failed_does_not,
        failed_attempts_follow_the_schedule_and_then_the_delivery_is_dead,
        the_first_attempt_waits_where_the_schedule_says_so,
        the_sender_may_ask_for_a_later_retry_or_none,
        an_attempt_that_was_never_sent_uses_no_step,
        a_delivery_that_can_never_be_sent_is_seen_and_ends,
        a_delivery_given_back_is_uncounted_and_due_at_once,
        an_error_has_the_same_bound_on_every_store,
        a_backlog_of_one_endpoint_does_not_delay_another,
        an_endpoint_has_at_most_so_many_attempts_under_way,
        a_rate_limit_bounds_how_many_attempts_begin,
        an_exchange_takes_about_as_many_bytes_as_it_asks_for,
        a_delivery_is_claimed_by_one_of_many_senders,
        an_ended_delivery_is_replayed_with_its_schedule_from_the_start,
        replaying_an_open_delivery_sends_it_now_or_changes_nothing,
        cancelling_a_message_ends_its_open_deliveries,
    }
    key_order {
        one_delivery_of_a_key_is_sent_at_a_time_and_in_order,
        a_failing_delivery_blocks_only_its_own_key,
        a_dead_delivery_parks_its_key_until_an_operator_decides,
        a_dead_delivery_is_passed_over_where_the_endpoint_says_so,
        cancelling_a_message_lets_the_next_one_of_its_key_go,
        a_changed_order_holds_for_what_waits_already,
        order_that_begins_during_a_later_attempt_blocks_no_key,
        order_holds_while_everything_happens_at_once,
    }
    circuits {
        five_failures_in_a_row_pause_an_endpoint_and_one_delivery_tries_it,
        a_probe_without_an_answer_delays_the_next_one_and_nothing_else,
        a_pause_that_an_endpoint_asks_for_holds_for_all_of_its_deliveries,
        an_endpoint_that_asks_for_it_is_disabled_and_comes_back_with_one_delivery,
        an_endpoint_that_asks_with_a_success_is_disabled_after_that_delivery,
        days_of_nothing_but_failures_disable_an_endpoint,
        a_refused_message_says_nothing_against_its_endpoint,
    }
    endpoints {
        an_endpoint_is_stored_with_every_setting,
        of_twenty_changes_of_one_version_one_wins,
        a_uid_names_one_endpoint_of_its_tenant,
        a_receiver_neither_enables_nor_disables_again_what_an_operator_disabled,
        a_tenant_has_at_most_so_many_endpoints,
        a_receiving_party_adds_at_most_so_many_endpoints,
        a_disabled_endpoint_holds_its_deliveries,
        what_an_endpoint_has_held_is_spread_out_once_it_is_enabled,
        a_deleted_endpoint_cancels_its_deliveries,
        a_delivery_that_fails_after_its_endpoint_was_deleted_is_cancelled,
        a_changed_address_serves_what_was_queued_before,
        rotated_secrets_sign_the_next_claim,
        an_endpoint_is_served_only_by_nodes_that_hold_its_keys,
        endpoints_are_listed_from_new_to_old_without_the_deleted,
    }
    expiring {
        what_is_dead_or_held_too_long_is_announced_once_and_then_cancelled,
        an_endpoint_that_was_repaired_is_announced_again,
        a_delivery_is_held_since_it_was_due_or_its_endpoint_disabled,
        a_request_that_got_through_counts_although_its_delivery_expired,
        dead_deliveries_of_a_deleted_endpoint_expire_without_an_announcement,
        what_is_parked_too_long_expires_before_the_dead_one_that_it_waits_for,
    }
    own_messages {
        the_trouble_of_an_endpoint_is_published_with_the_change,
        a_receiver_of_own_messages_gets_none_about_itself,
        what_no_endpoint_wants_is_not_stored,
        dead_deliveries_are_published_once_an_hour_with_their_number,
        deliveries_that_expire_soon_are_published_once_for_each_endpoint,
    }
    alert_records {
        an_alert_is_raised_once_and_cleared_once_for_all_nodes,
        a_problem_of_one_look_is_no_alert,
        only_a_judge_clears_an_alert_about_all_nodes,
        one_node_at_a_time_judges_the_data_of_all,
        the_handlers_of_all_nodes_that_are_alive_are_known,
        a_node_that_died_is_missing_and_one_that_stopped_is_not,
        a_node_ends_its_own_alerts_and_those_of_a_dead_one_are_listed_no_more,
        a_silenced_alert_is_published_when_its_silence_ends,
        an_alert_that_no_endpoint_wants_is_published_once_one_does,
    }
    replay_plans {
        what_died_in_a_time_is_sent_again_once,
        everything_of_a_time_is_sent_again_the_delivered_included,
        what_was_sent_in_a_time_is_sent_again_after_the_clock_was_set_back,
        what_an_endpoint_never_got_is_written_for_it,
        a_plan_with_a_rate_runs_in_time,
        a_cancelled_plan_stops_and_a_deleted_endpoint_ends_one,
        many_nodes_run_one_plan_and_take_each_delivery_once,
        of_plans_that_run_alone_one_of_an_endpoint_is_recorded_at_a_time,
    }
    event_plans {
        dead_letters_of_a_time_are_replayed_once,
        a_slice_is_taken_once_and_not_after_the_plan_ended,
        many_nodes_run_one_plan_and_take_each_event_once,
        everything_of_a_time_is_replayed_and_done_jobs_only_by_force,
        a_plan_over_a_time_is_whole_after_the_clock_was_set_back,
        events_in_review_are_approved_or_rejected_by_a_plan,
        a_job_that_goes_to_review_after_the_plan_is_not_decided_by_it,
        a_plan_leaves_jobs_alone_that_ended_after_it_was_made,
        a_plan_that_a_node_leaves_alone_delays_no_other,
        dead_letters_are_discarded_by_a_plan_of_one_handler_or_all,
        a_plan_takes_what_its_filter_names,
        a_plan_over_events_keeps_its_rate,
        a_repeated_request_makes_one_plan_over_events,
        ended_plans_are_deleted_with_the_events_of_their_time,
    }
    outbox_reads {
        messages_are_listed_from_new_to_old_and_filtered,
        a_message_is_read_with_its_deliveries_and_their_attempts,
        deliveries_are_listed_from_new_to_old_and_filtered,
        what_operators_did_is_part_of_the_story_of_a_delivery,
        the_messages_of_an_event_have_their_tenant_and_status,
        the_backlog_counts_what_is_open_and_what_is_dead,
    }
    tenant_deletion {
        a_deleted_tenant_loses_everything_but_what_recognises_copies,
        what_arrives_after_a_deletion_began_stays,
    }
    endpoint_history {
        the_hours_of_an_endpoint_are_added_up_over_nodes_and_end,
    }
    verifiers {
        a_secret_is_known_since_its_first_record_and_keeps_its_last_use,
    }
    source_secrets {
        secrets_of_a_pair_are_set_replaced_and_removed,
        of_twenty_changes_by_one_version_of_the_set_one_wins,
        resealing_replaces_the_sealed_value_and_nothing_else,
    }
}
