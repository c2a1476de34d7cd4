//! Finds out whether one sender sends its next request as soon as it has an answer. Then the writer looks for that
//! request for a moment before it sleeps, because waking a sleeping core takes longer than reading a request.

use std::time::Duration;

/// How long the writer looks for the next request: as long as an answer and a request need to and from a sender
/// nearby. A sender that is slower costs this time once.
pub(super) const NEXT_REQUEST_WITHIN: Duration = Duration::from_micros(100);

/// What the writer knows about its last requests.
#[derive(Debug, Default)]
pub(super) struct LoneSender {
    /// The last batch was one request.
    was_alone: bool,
    /// The last command came within [`NEXT_REQUEST_WITHIN`] of the end of a batch.
    was_quick: bool,
}

impl LoneSender {
    /// Whether the next request may follow at once.
    pub(super) fn expects_next(&self) -> bool {
        self.was_alone && self.was_quick
    }

    /// Records the number of requests of a batch.
    pub(super) fn note_batch(&mut self, requests: usize) {
        self.was_alone = requests == 1;
    }

    /// Records how long the writer waited for its next command; `None` if no command came.
    pub(super) fn note_wait(&mut self, waited: Option<Duration>) {
        self.was_quick = waited.is_some_and(|waited| waited < NEXT_REQUEST_WITHIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_request_is_expected_only_of_a_lone_sender_that_was_quick() {
        // Looking at any other time would use a core while nothing arrives, or take a core from a busy server.
        let quick = Some(NEXT_REQUEST_WITHIN / 2);
        let mut sender = LoneSender::default();
        assert!(!sender.expects_next());
        sender.note_batch(1);
        sender.note_wait(quick);
        assert!(sender.expects_next());
        sender.note_wait(Some(NEXT_REQUEST_WITHIN));
        assert!(!sender.expects_next(), "the sender took too long");
        sender.note_wait(None);
        assert!(!sender.expects_next(), "no request arrived");
        sender.note_wait(quick);
        sender.note_batch(2);
        assert!(!sender.expects_next(), "the last batch had several requests");
    }
}
