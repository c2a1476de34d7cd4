//! Decides about a receipt: new, a copy, a conflict, or for review. Every function here runs within
//! the batch's transaction, on the one thread that writes.

use std::sync::Arc;

use hapax_core::job::Phase;
use hapax_core::store::{ArrivalInfo, KnownEvent, NewJob, ReviewReason, Status, Verdict};
use hapax_core::{
    ContentGuard, EventKey, GuardKeep, GuardSeen, KeyHash, Receipt, SourceName, Tenant, Timeliness,
};
use rusqlite::OptionalExtension;

use super::{Batch, Writer};
use crate::recent::Recent;
use crate::sqlite::copies;
use crate::sqlite::existing::Existing;
use crate::sqlite::jobs::EventAt;
use crate::sqlite::new_rows::EventRow;
use crate::sqlite::row::{EventState, micros};

impl Writer {
    pub(super) fn decide(
        &mut self,
        batch: &mut Batch,
        receipt: &Receipt,
        jobs: &[NewJob],
        via: &ArrivalInfo,
    ) -> rusqlite::Result<Verdict> {
        let hash = receipt.key_hash();
        let existing = self.existing(batch, &hash)?;
        let is_copy = |one: &Existing| one.recent.body_hash == receipt.body_hash();
        if !existing.as_ref().is_some_and(is_copy) {
            let known = existing.as_ref().map(|one| one.seq);
            if let Some(verdict) = self.decide_suspected(batch, known, receipt, jobs, via)? {
                return Ok(verdict);
            }
        }
        if let Some(existing) = existing {
            return self.decide_known(batch, existing, Some(hash), receipt, jobs, via);
        }
        if let Some(existing) = self.in_a_neighbouring_span(batch, receipt)? {
            return self.decide_known(batch, existing, None, receipt, jobs, via);
        }
        if receipt.guard().is_some_and(|guard| guard.seen == GuardSeen::Duplicate)
            && let Some(seq) = self.held_by(receipt)?
        {
            let holder = self.existing_at(batch, seq)?;
            return self.decide_known(batch, holder, None, receipt, jobs, via);
        }
        let review = match receipt.timeliness() {
            Timeliness::Late { .. } => Some(ReviewReason::Late),
            Timeliness::OnTime => None,
        };
        self.insert(batch, (receipt.key(), hash), review, receipt, jobs, via)
    }

    /// A suspected replay, new or known. The replay has its own key, so that it does not take the id of
    /// another event. `known` is the event that has that id.
    fn decide_suspected(
        &mut self,
        batch: &mut Batch,
        known: Option<i64>,
        receipt: &Receipt,
        jobs: &[NewJob],
        via: &ArrivalInfo,
    ) -> rusqlite::Result<Option<Verdict>> {
        let Some(key) = receipt.if_replay() else { return Ok(None) };
        let hash = key.hash();
        if let Some(filed) = self.existing(batch, &hash)? {
            return self.decide_known(batch, filed, None, receipt, jobs, via).map(Some);
        }
        match self.held_by(receipt)? {
            Some(seq) if known != Some(seq) => {
                let review = Some(ReviewReason::Replay);
                self.insert(batch, (key, hash), review, receipt, jobs, via).map(Some)
            }
            Some(_) | None => Ok(None),
        }
    }

    fn in_a_neighbouring_span(
        &self,
        batch: &mut Batch,
        receipt: &Receipt,
    ) -> rusqlite::Result<Option<Existing>> {
        let Some(beside) = receipt.neighbours() else { return Ok(None) };
        let near = micros(beside.not_before)..=micros(beside.not_after);
        for key in &beside.keys {
            if let Some(existing) = self.existing(batch, &key.hash())?
                && near.contains(&existing.received_at)
            {
                return Ok(Some(existing));
            }
        }
        Ok(None)
    }

    /// Decides about a known key: a copy, a conflict, or the on-time copy of a late event. `hash`
    /// is set if the event is stored under the receipt's own key, so that memory may answer next
    /// time.
    fn decide_known(
        &mut self,
        batch: &mut Batch,
        existing: Existing,
        hash: Option<KeyHash>,
        receipt: &Receipt,
        jobs: &[NewJob],
        via: &ArrivalInfo,
    ) -> rusqlite::Result<Verdict> {
        let held_by = self.held_by(receipt)?;
        // Unsigned bytes may differ although all signed content is the same.
        let same_content = receipt.guard().is_some_and(|guard| guard.seen == GuardSeen::Duplicate)
            && held_by == Some(existing.seq);
        if existing.recent.body_hash == receipt.body_hash() || same_content {
            self.guard_copy(batch, existing.seq, held_by, receipt)?;
            // Content that ran as another event is a replay of that event, on time or not.
            let is_its_own = held_by.is_none_or(|seq| seq == existing.seq);
            let late = existing.recent.review == Some(ReviewReason::Late);
            if late && is_its_own && receipt.timeliness() == Timeliness::OnTime {
                return self.promote(batch, existing, receipt.key(), jobs, via);
            }
            return Ok(copy(batch, existing, hash, receipt, via));
        }
        if let Some(other) = receipt.if_conflict() {
            let hash = other.hash();
            let filed = match (self.existing(batch, &hash)?, held_by) {
                (Some(filed), _) => Some(filed),
                (None, Some(seq)) => Some(self.existing_at(batch, seq)?),
                (None, None) => None,
            };
            return match filed {
                Some(filed) => {
                    self.guard_copy(batch, filed.seq, held_by, receipt)?;
                    Ok(copy(batch, filed, None, receipt, via))
                }
                None => {
                    let review = Some(ReviewReason::Conflict);
                    self.insert(batch, (other, hash), review, receipt, jobs, via)
                }
            };
        }
        // If the id is part of the guarded content, no other id can have this content. With the guard, the next such
        // arrival would be a copy of the event, although the bodies differ.
        if receipt.guard().is_some_and(|guard| guard.seen == GuardSeen::Review) {
            self.guard_copy(batch, existing.seq, held_by, receipt)?;
        }
        self.conflict(batch, existing, receipt, via)
    }

    /// Stores the signed content of a copy, unless it is known with some event already. Captured
    /// and sent under another id, it is then recognised as a replay too.
    fn guard_copy(
        &mut self,
        batch: &mut Batch,
        seq: i64,
        held_by: Option<i64>,
        receipt: &Receipt,
    ) -> rusqlite::Result<()> {
        let (Some(guard), None) = (receipt.guard(), held_by) else { return Ok(()) };
        self.conn.prepare_cached(include_str!("../sql/insert_guard.sql"))?.execute((
            &guard.hash.0[..],
            seq,
            self.guarded_until(guard),
        ))?;
        batch.wrote = true;
        Ok(())
    }

    fn guarded_until(&self, guard: ContentGuard) -> Option<i64> {
        match guard.keep {
            GuardKeep::For(long) => {
                let long = i64::try_from(long.as_micros()).unwrap_or(i64::MAX);
                Some(micros(self.now()).saturating_add(long))
            }
            GuardKeep::WithKeys => None,
        }
    }

    fn promote(
        &mut self,
        batch: &mut Batch,
        existing: Existing,
        key: &EventKey,
        jobs: &[NewJob],
        via: &ArrivalInfo,
    ) -> rusqlite::Result<Verdict> {
        let out = self.out_of_review(existing.seq, key, jobs)?;
        assert!(out, "the writer alone changes the state it has just read");
        batch.wrote = true;
        batch.work |= !jobs.is_empty();
        batch.copies.push((existing.seq, via.clone()));
        Ok(Verdict::Accepted(existing.recent.known.id))
    }

    /// Takes an event out of review, for an on-time copy and for an operator alike: the jobs are
    /// written in the same transaction. Returns false if it was not in review.
    pub(in crate::sqlite) fn out_of_review(
        &mut self,
        seq: i64,
        key: &EventKey,
        jobs: &[NewJob],
    ) -> rusqlite::Result<bool> {
        let out = self.conn.prepare_cached(include_str!("../sql/promote.sql"))?.execute([seq])?;
        if out == 0 {
            return Ok(false);
        }
        let pair = self.pair(&key.tenant, &key.source)?;
        let event = EventAt { seq, pair, tenant: &key.tenant, source: &key.source };
        self.lanes.write(&self.conn, event, jobs, (self.clock)())?;
        Ok(true)
    }

    fn conflict(
        &mut self,
        batch: &mut Batch,
        existing: Existing,
        receipt: &Receipt,
        via: &ArrivalInfo,
    ) -> rusqlite::Result<Verdict> {
        copies::write_conflict(&self.conn, existing.seq, via, receipt.body())?;
        batch.wrote = true;
        Ok(Verdict::Conflict(existing.recent.known))
    }

    fn insert(
        &mut self,
        batch: &mut Batch,
        (key, hash): (&EventKey, KeyHash),
        review: Option<ReviewReason>,
        receipt: &Receipt,
        jobs: &[NewJob],
        via: &ArrivalInfo,
    ) -> rusqlite::Result<Verdict> {
        let pair = self.pair(&key.tenant, &key.source)?;
        // If several events have the same signed bytes, the first one keeps the entry.
        let guard = match self.held_by(receipt)? {
            Some(_) => None,
            None => receipt.guard(),
        };
        self.last_seq += 1;
        let seq = self.last_seq;
        let id = self.ids.make(via.received_at, seq);
        let event_state = EventState::new(review);
        let (state, review_column) = event_state.columns();
        batch.rows.event(EventRow {
            seq,
            id,
            pair,
            event_id: key.event_id.clone(),
            received_at: micros(via.received_at),
            body_hash: receipt.body_hash(),
            guard_hash: guard.map(|guard| guard.hash),
            guard_until: guard.and_then(|guard| self.guarded_until(guard)),
            state,
            review: review_column,
            event_type: receipt.event_type().map(Into::into),
            occurred_at: receipt.occurred_at().map(micros),
            request_id: via.request_id,
            remote: via.remote,
            secret: via.secret as i64,
            signed_at: via.signed_at.map(micros),
            headers: Arc::clone(&via.headers),
            body: receipt.body().clone(),
        });
        batch.wrote = true;
        self.index.claim(hash, seq);
        if let Some(guard) = guard {
            self.index.claim(guard.hash, seq);
        }
        // An event in review has no jobs yet.
        let jobs = if review.is_some() { &[] } else { jobs };
        if !jobs.is_empty() {
            let event = EventAt { seq, pair, tenant: &key.tenant, source: &key.source };
            let (now, rows) = ((self.clock)(), batch.rows.jobs());
            batch.work |= self.lanes.add_rows(&self.conn, event, jobs, now, rows)?;
        }
        let phase = |job: &NewJob| if job.hopeless.is_some() { Phase::Dead } else { Phase::Ready };
        let status = match event_state.status() {
            Status::Ignored => Status::of_jobs(jobs.iter().map(|job| (phase(job), 0))),
            waiting => waiting,
        };
        let known = KnownEvent { id, status, result: None };
        let guard = receipt.guard().map(|guard| guard.hash);
        let body_hash = receipt.body_hash();
        batch.recent.push((hash, Recent { body_hash, guard, known, review }));
        Ok(match review {
            None => Verdict::Accepted(id),
            Some(_) => Verdict::Review(id),
        })
    }

    /// The event that was seen with the same signed content.
    fn held_by(&self, receipt: &Receipt) -> rusqlite::Result<Option<i64>> {
        let Some(guard) = receipt.guard() else { return Ok(None) };
        if let Some(seq) = self.index.find(&self.conn, &guard.hash)? {
            return Ok(Some(seq));
        }
        self.conn
            .prepare_cached(include_str!("../sql/find_guard.sql"))?
            .query_row([&guard.hash.0[..]], |row| row.get(0))
            .optional()
    }

    fn existing(&self, batch: &mut Batch, hash: &KeyHash) -> rusqlite::Result<Option<Existing>> {
        let seq = self.index.find(&self.conn, hash)?;
        seq.map(|seq| self.existing_at(batch, seq)).transpose()
    }

    /// The event with this number, committed or in the batch.
    fn existing_at(&self, batch: &mut Batch, seq: i64) -> rusqlite::Result<Existing> {
        if batch.rows.hold(seq) {
            batch.rows.insert(&self.conn)?;
        }
        Existing::at(&self.conn, seq)?.ok_or(rusqlite::Error::QueryReturnedNoRows)
    }

    pub(in crate::sqlite) fn pair(
        &mut self,
        tenant: &Tenant,
        source: &SourceName,
    ) -> rusqlite::Result<i64> {
        let name = (tenant.clone(), source.clone());
        if let Some(pair) = self.pairs.get(&name) {
            return Ok(*pair);
        }
        let pair = self.pairs.len() as i64 + 1;
        self.conn.execute(
            "INSERT INTO hapax_pair (pair, tenant, source) VALUES (?1, ?2, ?3)",
            (pair, tenant.as_str(), source.as_str()),
        )?;
        self.pairs.insert(name, pair);
        Ok(pair)
    }
}

fn copy(
    batch: &mut Batch,
    existing: Existing,
    hash: Option<KeyHash>,
    receipt: &Receipt,
    via: &ArrivalInfo,
) -> Verdict {
    let known = existing.recent.known.clone();
    batch.copies.push((existing.seq, via.clone()));
    if let Some(hash) = hash {
        let guard = receipt.guard().map(|guard| guard.hash);
        batch.recent.push((hash, Recent { guard, ..existing.recent }));
    }
    Verdict::Duplicate(known)
}
