//! `instr`, `replace`, the `trim` family and `unhex`.

use std::collections::{BTreeSet, HashMap, HashSet};

use memchr::memmem;
use rusqlite::functions::Context;
use rusqlite::types::ValueRef;

use super::{Text, Tools, WorkCount, is_continuation, read_char, too_big, until_nul};

/// `instr(haystack, needle)`: where the needle begins, counted from 1 in characters, or in bytes
/// if both are blobs; 0 if it is absent.
pub(super) fn instr(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<i64>> {
    let (first, second) = (context.get_raw(0), context.get_raw(1));
    let (Some(haystack), Some(needle)) = (tools.text(first)?, tools.text(second)?) else {
        return Ok(None);
    };
    let in_bytes = matches!((first, second), (ValueRef::Blob(_), ValueRef::Blob(_)));
    let Some(&start) = needle.first() else { return Ok(Some(1)) };
    let found = if !in_bytes && is_continuation(start) {
        // A needle that begins in the middle of a character is found only at the start of the
        // haystack.
        haystack.starts_with(&needle).then_some(0)
    } else {
        memmem::find(&haystack, &needle)
    };
    let Some(at) = found else { return Ok(Some(0)) };
    let before = if in_bytes || at == 0 {
        at
    } else {
        haystack[1..=at].iter().filter(|byte| !is_continuation(**byte)).count()
    };
    Ok(i64::try_from(before + 1).ok())
}

/// `replace(text, pattern, replacement)`.
pub(super) fn replace(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<Text>> {
    let (Some(text), Some(pattern)) =
        (tools.text(context.get_raw(0))?, tools.text(context.get_raw(1))?)
    else {
        return Ok(None);
    };
    if until_nul(&pattern).is_empty() {
        return Ok(Some(Text(text.to_vec())));
    }
    let Some(replacement) = tools.text(context.get_raw(2))? else { return Ok(None) };
    let mut work = tools.work();
    let mut made = Vec::with_capacity(text.len());
    let mut copied = 0;
    for at in memmem::find_iter(&text, &*pattern) {
        made.extend_from_slice(&text[copied..at]);
        made.extend_from_slice(&replacement);
        copied = at + pattern.len();
        if made.len() + (text.len() - copied) > tools.bytes_max && replacement.len() > pattern.len()
        {
            return Err(too_big());
        }
        work.step(1)?;
    }
    made.extend_from_slice(&text[copied..]);
    Ok(Some(Text(made)))
}

/// `trim(text, characters)`.
pub(super) fn trim(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<Text>> {
    trimmed(context, tools, true, true)
}

/// `ltrim(text, characters)`.
pub(super) fn ltrim(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<Text>> {
    trimmed(context, tools, true, false)
}

/// `rtrim(text, characters)`.
pub(super) fn rtrim(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<Text>> {
    trimmed(context, tools, false, true)
}

fn trimmed(
    context: &Context<'_>,
    tools: &Tools,
    left: bool,
    right: bool,
) -> rusqlite::Result<Option<Text>> {
    let (Some(text), Some(set)) =
        (tools.text(context.get_raw(0))?, tools.text(context.get_raw(1))?)
    else {
        return Ok(None);
    };
    let mut work = tools.work();
    let set = CharacterSet::of(until_nul(&set), &mut work)?;
    let mut rest = &text[..];
    while left && let Some(length) = set.first_in(|length| rest.get(..length)) {
        rest = &rest[length..];
        work.step(set.lengths.len())?;
    }
    while right
        && let Some(length) =
            set.first_in(|length| rest.len().checked_sub(length).map(|start| &rest[start..]))
    {
        rest = &rest[..rest.len() - length];
        work.step(set.lengths.len())?;
    }
    Ok(Some(Text(rest.to_vec())))
}

/// The characters to trim. In malformed text one character can be the beginning of another: the
/// first one in the set counts.
struct CharacterSet<'a> {
    order: HashMap<&'a [u8], usize>,
    lengths: BTreeSet<usize>,
}

impl<'a> CharacterSet<'a> {
    fn of(mut text: &'a [u8], work: &mut WorkCount<'_>) -> rusqlite::Result<Self> {
        let mut set = Self { order: HashMap::new(), lengths: BTreeSet::new() };
        while let Some((_, rest)) = read_char(text) {
            let char = &text[..text.len() - rest.len()];
            let place = set.order.len();
            set.order.entry(char).or_insert(place);
            set.lengths.insert(char.len());
            text = rest;
            work.step(1)?;
        }
        Ok(set)
    }

    /// The length of the character at `at`.
    fn first_in<'t>(&self, at: impl Fn(usize) -> Option<&'t [u8]>) -> Option<usize> {
        let found = self.lengths.iter().filter_map(|&length| {
            let place = self.order.get(at(length)?)?;
            Some((place, length))
        });
        found.min().map(|(_, length)| length)
    }
}

/// `unhex(text, ignored characters)`.
pub(super) fn unhex(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<Vec<u8>>> {
    let (Some(text), Some(ignored)) =
        (tools.text(context.get_raw(0))?, tools.text(context.get_raw(1))?)
    else {
        return Ok(None);
    };
    let mut passes = HashSet::new();
    let mut rest = &ignored[..];
    let mut work = tools.work();
    while let Some((char, after)) = read_char(rest) {
        passes.insert(char);
        rest = after;
        work.step(1)?;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut made = Vec::with_capacity(text.len() / 2);
    let mut rest = until_nul(&text);
    while let Some((&first, after)) = rest.split_first() {
        work.step(1)?;
        let Some(high) = digit(first) else {
            match read_char(rest) {
                Some((char, after)) if passes.contains(&char) => rest = after,
                Some(_) | None => return Ok(None),
            }
            continue;
        };
        let Some(low) = after.first().copied().and_then(digit) else { return Ok(None) };
        made.push(high << 4 | low);
        rest = &after[1..];
    }
    Ok(Some(made))
}
