//! `LIKE` and `GLOB`.
//!
//! Only the last `%` or `*` that was passed has to be tried at other places, so the match needs no
//! recursion. The match can still take as many steps as the lengths of text and pattern multiplied; the
//! deadline ends it.

use rusqlite::functions::Context;

use super::{Tools, WorkCount, error, read_char, until_nul};

/// SQLite's default for the length of a pattern.
const PATTERN_BYTES_MAX: usize = 50_000;

/// `like(pattern, text)` and `like(pattern, text, escape)`.
pub(super) fn like(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<bool>> {
    let pattern = tools.text(context.get_raw(0))?;
    bounded(pattern.as_deref())?;
    let mut wildcards = Wildcards { any: Some('%'.into()), one: Some('_'.into()), escape: None };
    if context.len() == 3 {
        let Some(escape) = tools.text(context.get_raw(2))? else { return Ok(None) };
        let Some((char, [])) = read_char(until_nul(&escape)) else {
            return Err(error("ESCAPE expression must be a single character"));
        };
        // An escape that is a wildcard too is only an escape.
        wildcards.any = wildcards.any.filter(|any| *any != char);
        wildcards.one = wildcards.one.filter(|one| *one != char);
        wildcards.escape = Some(char);
    }
    let text = tools.text(context.get_raw(1))?;
    let (Some(pattern), Some(text)) = (pattern, text) else { return Ok(None) };
    let parts = parse_like(until_nul(&pattern), &wildcards);
    matches(&parts, until_nul(&text), Case::Ignored, &mut tools.work()).map(Some)
}

/// `glob(pattern, text)`.
pub(super) fn glob(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<bool>> {
    let pattern = tools.text(context.get_raw(0))?;
    bounded(pattern.as_deref())?;
    let text = tools.text(context.get_raw(1))?;
    let (Some(pattern), Some(text)) = (pattern, text) else { return Ok(None) };
    let parts = parse_glob(until_nul(&pattern));
    matches(&parts, until_nul(&text), Case::Counts, &mut tools.work()).map(Some)
}

fn bounded(pattern: Option<&[u8]>) -> rusqlite::Result<()> {
    match pattern {
        Some(pattern) if pattern.len() > PATTERN_BYTES_MAX => {
            Err(error("LIKE or GLOB pattern too complex"))
        }
        Some(_) | None => Ok(()),
    }
}

struct Wildcards {
    any: Option<u32>,
    one: Option<u32>,
    escape: Option<u32>,
}

#[derive(Clone, Copy, PartialEq)]
enum Case {
    /// The case of ASCII letters is ignored, as in SQLite.
    Ignored,
    Counts,
}

enum PatternPart {
    Any,
    One,
    Char(u32),
    Set(CharacterSet),
    /// An escape or a set that the pattern's end cut off: nothing matches.
    Never,
}

struct CharacterSet {
    inverted: bool,
    ranges: Vec<(u32, u32)>,
}

fn parse_like(mut pattern: &[u8], wildcards: &Wildcards) -> Vec<PatternPart> {
    let mut parts = Vec::new();
    while let Some((char, rest)) = read_char(pattern) {
        pattern = rest;
        let char = Some(char);
        parts.push(if char == wildcards.any {
            PatternPart::Any
        } else if char == wildcards.escape {
            match read_char(pattern) {
                Some((escaped, rest)) => {
                    pattern = rest;
                    PatternPart::Char(escaped)
                }
                None => PatternPart::Never,
            }
        } else if char == wildcards.one {
            PatternPart::One
        } else {
            char.map_or(PatternPart::Never, PatternPart::Char)
        });
    }
    parts
}

fn parse_glob(mut pattern: &[u8]) -> Vec<PatternPart> {
    let mut parts = Vec::new();
    while let Some((char, rest)) = read_char(pattern) {
        pattern = rest;
        parts.push(match u8::try_from(char) {
            Ok(b'*') => PatternPart::Any,
            Ok(b'?') => PatternPart::One,
            Ok(b'[') => {
                let (set, rest) = parse_set(pattern);
                pattern = rest;
                set.map_or(PatternPart::Never, PatternPart::Set)
            }
            Ok(_) | Err(_) => PatternPart::Char(char),
        });
    }
    parts
}

/// Parses the set between `[` and `]`; `None` if there is no `]`.
fn parse_set(mut pattern: &[u8]) -> (Option<CharacterSet>, &[u8]) {
    let mut set = CharacterSet { inverted: false, ranges: Vec::new() };
    if let [b'^', rest @ ..] = pattern {
        set.inverted = true;
        pattern = rest;
    }
    // At the start of a set, a bracket is an ordinary character.
    if let [b']', rest @ ..] = pattern {
        set.ranges.push((b']'.into(), b']'.into()));
        pattern = rest;
    }
    let mut before = None;
    while let Some((char, rest)) = read_char(pattern) {
        pattern = rest;
        if char == u32::from(b']') {
            return (Some(set), pattern);
        }
        let range = before.filter(|_| char == u32::from(b'-') && !pattern.starts_with(b"]"));
        match (range, read_char(pattern)) {
            (Some(low), Some((high, rest))) => {
                set.ranges.push((low, high));
                pattern = rest;
                before = None;
            }
            (Some(_) | None, _) => {
                set.ranges.push((char, char));
                before = Some(char);
            }
        }
    }
    (None, pattern)
}

fn matches(
    parts: &[PatternPart],
    text: &[u8],
    case: Case,
    work: &mut WorkCount<'_>,
) -> rusqlite::Result<bool> {
    let (mut at, mut rest) = (0, text);
    // The part after the last wildcard for any length, and where in the text it is tried.
    let mut again: Option<(usize, &[u8])> = None;
    loop {
        work.step(1)?;
        let went = match parts.get(at) {
            Some(PatternPart::Any) => {
                at += 1;
                if at == parts.len() {
                    return Ok(true);
                }
                rest = skip(parts.get(at), rest, case, work)?;
                again = Some((at, rest));
                continue;
            }
            Some(part) => match read_char(rest) {
                Some((char, after)) if fits(part, char, case, work)? => Some(after),
                Some(_) | None => None,
            },
            None if rest.is_empty() => return Ok(true),
            None => None,
        };
        if let Some(after) = went {
            at += 1;
            rest = after;
            continue;
        }
        let Some((part, tried)) = again else { return Ok(false) };
        let Some((_, next)) = read_char(tried) else { return Ok(false) };
        at = part;
        rest = skip(parts.get(at), next, case, work)?;
        again = Some((part, rest));
    }
}

/// The rest of the text from the first place where `part` can fit.
fn skip<'a>(
    part: Option<&PatternPart>,
    text: &'a [u8],
    case: Case,
    work: &mut WorkCount<'_>,
) -> rusqlite::Result<&'a [u8]> {
    let Some(PatternPart::Char(char)) = part else { return Ok(text) };
    let Some(byte) = u8::try_from(*char).ok().filter(u8::is_ascii) else { return Ok(text) };
    let found = match case {
        Case::Ignored => {
            memchr::memchr2(byte.to_ascii_lowercase(), byte.to_ascii_uppercase(), text)
        }
        Case::Counts => memchr::memchr(byte, text),
    };
    let at = found.unwrap_or(text.len());
    work.step(at / 16)?;
    Ok(&text[at..])
}

fn fits(
    part: &PatternPart,
    char: u32,
    case: Case,
    work: &mut WorkCount<'_>,
) -> rusqlite::Result<bool> {
    Ok(match part {
        PatternPart::One => true,
        PatternPart::Char(wanted) => {
            *wanted == char || (case == Case::Ignored && folded(*wanted) == folded(char))
        }
        PatternPart::Set(set) => {
            work.step(set.ranges.len())?;
            let inside = set.ranges.iter().any(|(low, high)| (*low..=*high).contains(&char));
            inside != set.inverted
        }
        PatternPart::Any | PatternPart::Never => false,
    })
}

fn folded(char: u32) -> u32 {
    if (u32::from(b'A')..=u32::from(b'Z')).contains(&char) { char + 32 } else { char }
}
