//! Published messages: they are deleted with the history of their time, as on PostgreSQL.

use hapax_core::Timestamp;

use super::row::micros;
use super::writer::Writer;

/// Deletes up to `limit` messages that were published before `before`. Returns true if there may be
/// more.
pub(super) fn forget(
    writer: &mut Writer,
    before: Timestamp,
    limit: usize,
) -> rusqlite::Result<bool> {
    let before = micros(before);
    let any = writer
        .conn
        .prepare_cached("SELECT 1 FROM hapax_message WHERE created_at < ?1 LIMIT 1")?
        .exists([before])?;
    if !any {
        return Ok(false);
    }
    let gone = writer.in_transaction(|writer| {
        writer
            .conn
            .prepare_cached(
                "DELETE FROM hapax_message WHERE message IN (
                     SELECT message FROM hapax_message WHERE created_at < ?1
                     ORDER BY created_at LIMIT ?2)",
            )?
            .execute((before, limit as i64))
    })?;
    Ok(gone >= limit)
}
