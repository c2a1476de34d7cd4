//! `json_patch`, `jsonb_patch` and `json_pretty`.
//!
//! SQLite compares each member of a patch with each member of its target, and indents deep values without a
//! bound on the result. The functions here work on the text that the built-in `json()` returns. That text has
//! no white space outside strings, and it is standard JSON, whatever form of JSON SQLite was given.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};

use rusqlite::functions::{Context, SubType};
use rusqlite::types::{Value, ValueRef};

use super::{Text, Tools, WorkCount, error, too_big, until_nul};

/// The subtype that marks a text as JSON for the next function.
const JSON_SUBTYPE: SubType = Some(b'J' as u32);

/// SQLite's bound on nesting.
const DEPTH_MAX: usize = 1_000;

/// `json_patch(target, patch)`, the merge patch of RFC 7396.
pub(super) fn patch(
    context: &Context<'_>,
    tools: &Tools,
) -> rusqlite::Result<(Option<Text>, SubType)> {
    Ok(match patched(context, tools)? {
        Some(patched) => (Some(Text(patched)), JSON_SUBTYPE),
        None => (None, None),
    })
}

/// `jsonb_patch(target, patch)`.
pub(super) fn patch_binary(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Value> {
    match patched(context, tools)? {
        Some(patched) => tools.plainly("SELECT jsonb(?1)", ValueRef::Text(&patched)),
        None => Ok(Value::Null),
    }
}

/// `json_pretty(json)` and `json_pretty(json, indent)`.
pub(super) fn pretty(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<Text>> {
    let Some(json) = minified(context.get_raw(0), tools)? else { return Ok(None) };
    let indent = if context.len() == 2 { tools.text(context.get_raw(1))? } else { None };
    let indent = indent.as_deref().map_or(&b"    "[..], until_nul);
    let mut made = Vec::with_capacity(json.len());
    let mut depth = 0;
    let mut work = tools.work();
    let mut line = |made: &mut Vec<u8>, depth: usize| {
        made.push(b'\n');
        for _ in 0..depth {
            work.step(1 + indent.len() / 16)?;
            made.extend_from_slice(indent);
            if made.len() > tools.bytes_max {
                return Err(too_big());
            }
        }
        Ok(())
    };
    let mut rest = &json[..];
    while let Some((&byte, after)) = rest.split_first() {
        match byte {
            b'[' | b'{' if matches!(after.first(), Some(b']' | b'}')) => {
                made.extend_from_slice(&rest[..2]);
                rest = &after[1..];
                continue;
            }
            b'[' | b'{' => {
                depth += 1;
                if depth >= DEPTH_MAX {
                    return Err(error("JSON nested too deep"));
                }
                made.push(byte);
                line(&mut made, depth)?;
            }
            b']' | b'}' => {
                depth -= 1;
                line(&mut made, depth)?;
                made.push(byte);
            }
            b',' => {
                made.push(byte);
                line(&mut made, depth)?;
            }
            b':' => made.extend_from_slice(b": "),
            b'"' => {
                let (string, after) = split_string(rest);
                made.extend_from_slice(string);
                rest = after;
                continue;
            }
            _ => made.push(byte),
        }
        rest = after;
    }
    if made.len() > tools.bytes_max {
        return Err(too_big());
    }
    Ok(Some(Text(made)))
}

fn patched(context: &Context<'_>, tools: &Tools) -> rusqlite::Result<Option<Vec<u8>>> {
    // The target is read first: if it is NULL, SQLite never reads the patch.
    let Some(target) = minified(context.get_raw(0), tools)? else { return Ok(None) };
    let Some(patch) = minified(context.get_raw(1), tools)? else { return Ok(None) };
    merge(&target, &patch, &mut tools.work()).map(Some)
}

/// JSON without white space; `None` for NULL, an error for invalid JSON.
fn minified(value: ValueRef<'_>, tools: &Tools) -> rusqlite::Result<Option<Vec<u8>>> {
    Ok(match tools.plainly("SELECT CAST(json(?1) AS BLOB)", value)? {
        Value::Blob(json) => Some(json),
        _ => None,
    })
}

fn merge<'a>(
    target: &'a [u8],
    patch: &'a [u8],
    work: &mut WorkCount<'_>,
) -> rusqlite::Result<Vec<u8>> {
    if !patch.starts_with(b"{") {
        return Ok(patch.to_vec());
    }
    // The objects that the patch changes, and the patches in progress. A body decides how deep the objects
    // are nested, so neither merging nor rendering is recursive.
    let mut objects = vec![Object::parse(target, work)?];
    let mut patches = vec![(0, split_members(patch, work)?.into_iter())];
    while let Some((at, members)) = patches.last_mut() {
        let Some((label, value)) = members.next() else {
            patches.pop();
            continue;
        };
        let object = *at;
        if value == b"null" {
            objects[object].remove(label);
        } else if value.starts_with(b"{") {
            let next = objects.len();
            let node = objects[object].member(label);
            let child = match *node {
                Node::Object(child) => child,
                Node::Raw(raw) => {
                    *node = Node::Object(next);
                    objects.push(Object::parse(raw, work)?);
                    next
                }
            };
            if patches.len() > DEPTH_MAX {
                return Err(error("JSON nested too deep"));
            }
            patches.push((child, split_members(value, work)?.into_iter()));
        } else {
            *objects[object].member(label) = Node::Raw(value);
        }
    }
    rendered(&objects, work)
}

/// A value while it is patched.
#[derive(Clone, Copy)]
enum Node<'a> {
    Raw(&'a [u8]),
    /// The index of an object.
    Object(usize),
}

#[derive(Default)]
struct Object<'a> {
    /// A removed member leaves a gap, so that the indexes of the others stay.
    members: Vec<Option<(&'a [u8], Node<'a>)>>,
    places: HashMap<Cow<'a, [u8]>, VecDeque<usize>>,
}

impl<'a> Object<'a> {
    /// Parses `json` as an object; any other value becomes an empty one.
    fn parse(json: &'a [u8], work: &mut WorkCount<'_>) -> rusqlite::Result<Self> {
        let mut object = Self::default();
        if json.starts_with(b"{") {
            for (label, value) in split_members(json, work)? {
                object.add(label, Node::Raw(value));
            }
        }
        Ok(object)
    }

    fn add(&mut self, label: &'a [u8], node: Node<'a>) {
        self.places.entry(unescaped(label)).or_default().push_back(self.members.len());
        self.members.push(Some((label, node)));
    }

    fn remove(&mut self, label: &'a [u8]) {
        if let Some(places) = self.places.get_mut(&unescaped(label))
            && let Some(place) = places.pop_front()
        {
            self.members[place] = None;
        }
    }

    /// The first member of this name, or a new one that is null.
    fn member(&mut self, label: &'a [u8]) -> &mut Node<'a> {
        let found = self.places.get(&unescaped(label)).and_then(|places| places.front().copied());
        let place = found.unwrap_or_else(|| {
            self.add(label, Node::Raw(b"null"));
            self.members.len() - 1
        });
        &mut self.members[place].get_or_insert((label, Node::Raw(b"null"))).1
    }
}

fn rendered(objects: &[Object<'_>], work: &mut WorkCount<'_>) -> rusqlite::Result<Vec<u8>> {
    let mut made = vec![b'{'];
    let mut open = vec![objects[0].members.iter().flatten()];
    while let Some(members) = open.last_mut() {
        let Some((label, node)) = members.next() else {
            open.pop();
            made.push(b'}');
            continue;
        };
        if made.last() != Some(&b'{') {
            made.push(b',');
        }
        made.extend_from_slice(label);
        made.push(b':');
        match node {
            Node::Raw(raw) => {
                work.step(1 + raw.len() / 16)?;
                made.extend_from_slice(raw);
            }
            Node::Object(place) => {
                made.push(b'{');
                open.push(objects[*place].members.iter().flatten());
            }
        }
    }
    Ok(made)
}

/// The labels, quotes included, and values of an object without white space.
fn split_members<'a>(
    object: &'a [u8],
    work: &mut WorkCount<'_>,
) -> rusqlite::Result<Vec<(&'a [u8], &'a [u8])>> {
    let mut members = Vec::new();
    let mut rest = object.get(1..).unwrap_or_default();
    while rest.first() == Some(&b'"') {
        let (label, after) = split_string(rest);
        let value = after.get(1..).unwrap_or_default();
        let length = value_length(value, work)?;
        members.push((label, &value[..length]));
        rest = value.get(length + 1..).unwrap_or_default();
    }
    Ok(members)
}

/// The length of the value at the start of the text.
fn value_length(text: &[u8], work: &mut WorkCount<'_>) -> rusqlite::Result<usize> {
    let mut depth = 0_usize;
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        work.step(1)?;
        match byte {
            b'"' => {
                rest = split_string(rest).1;
                continue;
            }
            b',' | b']' | b'}' if depth == 0 => break,
            b']' | b'}' => depth -= 1,
            b'[' | b'{' => depth += 1,
            _ => {}
        }
        rest = after;
    }
    Ok(text.len() - rest.len())
}

/// The string at the start of the text, with its quotes, and the rest.
fn split_string(text: &[u8]) -> (&[u8], &[u8]) {
    let mut at = 1;
    while let Some(found) = text.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        at += found;
        if text[at] == b'"' {
            return text.split_at(at + 1);
        }
        at += 2;
    }
    (text, &[])
}

/// A label in the form in which it is compared: two spellings of one label are equal.
fn unescaped(label: &[u8]) -> Cow<'_, [u8]> {
    let inside = label.get(1..label.len() - 1).unwrap_or_default();
    if !inside.contains(&b'\\') {
        return Cow::Borrowed(inside);
    }
    let mut made = Vec::with_capacity(inside.len());
    let mut rest = inside;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            made.push(byte);
            continue;
        }
        let Some((&kind, after)) = rest.split_first() else { break };
        rest = after;
        match kind {
            b'b' => made.push(0x08),
            b'f' => made.push(0x0c),
            b'n' => made.push(b'\n'),
            b'r' => made.push(b'\r'),
            b't' => made.push(b'\t'),
            b'u' => {
                let mut unit = hex4(rest);
                rest = rest.get(4..).unwrap_or_default();
                if unit & 0xfc00 == 0xd800
                    && let [b'\\', b'u', low @ ..] = rest
                    && hex4(low) & 0xfc00 == 0xdc00
                {
                    unit = 0x1_0000 + ((unit & 0x3ff) << 10) + (hex4(low) & 0x3ff);
                    rest = low.get(4..).unwrap_or_default();
                }
                push_utf8(&mut made, unit);
            }
            other => made.push(other),
        }
    }
    Cow::Owned(made)
}

fn hex4(text: &[u8]) -> u32 {
    let digits = text.get(..4).unwrap_or_default();
    digits
        .iter()
        .fold(0, |number, digit| number << 4 | char::from(*digit).to_digit(16).unwrap_or_default())
}

/// An unpaired half of a surrogate pair is written like any other character of three bytes.
fn push_utf8(made: &mut Vec<u8>, char: u32) {
    let [_, a, b, c] = char.to_be_bytes();
    let low = |shift: u32| 0x80 | u8::try_from(char >> shift & 0x3f).unwrap_or_default();
    match char {
        0..0x80 => made.push(c),
        0x80..0x800 => made.extend([0xc0 | (b << 2) | (c >> 6), low(0)]),
        0x800..0x1_0000 => made.extend([0xe0 | (b >> 4), low(6), low(0)]),
        _ => made.extend([0xf0 | (a >> 2), low(12), low(6), low(0)]),
    }
}
