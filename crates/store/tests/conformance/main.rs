//! One suite for every store. A case is a function over any store; the macro at the end runs each
//! case on the model in memory and on SQLite. New semantics begin here, as a failing case.

mod cases;
#[allow(dead_code)]
mod harness;
mod plans;

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
                let place = crate::harness::Place::new();
                crate::cases::$case(std::sync::Arc::new(place.open())).await;
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
    copies_are_counted_and_the_newest_few_kept_in_full,
    a_list_pages_from_new_to_old_and_filters,
    an_event_is_found_by_either_id_and_an_ambiguous_one_is_said_to_be,
    a_key_is_known_once_its_event_is_there,
}
