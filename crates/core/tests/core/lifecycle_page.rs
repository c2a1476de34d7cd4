//! The tables of docs/lifecycle.md, which must list exactly the transitions that the code allows.

use std::collections::BTreeSet;
use std::fmt::Debug;

/// One transition: the act, the phase before it and the phase after it.
pub(crate) type Transition = (String, String, String);

/// The transitions in the first table after this heading.
pub(crate) fn listed_transitions(heading: &str) -> BTreeSet<Transition> {
    let page = include_str!("../../../../docs/lifecycle.md");
    let (_, section) = page.split_once(heading).expect("the section");
    let (_, rows) = section.split_once("| act | from | to |").expect("a table of acts");
    let mut listed = BTreeSet::new();
    for row in rows.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        for from in cells[2].split(", ") {
            for to in cells[3].split(", ") {
                listed.insert((cells[1].to_owned(), from.to_owned(), to.to_owned()));
            }
        }
    }
    listed
}

/// A phase as the page writes it.
pub(crate) fn word(phase: impl Debug) -> String {
    format!("{phase:?}").to_lowercase()
}
