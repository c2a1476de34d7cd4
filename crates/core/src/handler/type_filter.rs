//! Globs over event types: which events a handler wants.

use serde::{Deserialize, Serialize};

use super::HandlerError;

/// Globs over event types: `payout.*`, where `*` matches any characters. Empty matches all types.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct TypeFilter(Vec<String>);

impl TypeFilter {
    /// Takes the globs as written. An empty glob would match nothing and is refused.
    pub fn new(globs: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, HandlerError> {
        let globs: Vec<String> = globs.into_iter().map(Into::into).collect();
        if globs.iter().any(String::is_empty) {
            return Err(HandlerError {
                field: "types",
                problem: "an empty type matches nothing".to_owned(),
                hint: "write \"payout.*\" or \"*\"; leave `types` out for all".to_owned(),
            });
        }
        Ok(Self(globs))
    }

    /// Whether an event of this type matches. An event without a type matches only where all types do.
    pub fn matches(&self, event_type: Option<&str>) -> bool {
        let matches = |glob: &String| match event_type {
            Some(event_type) => glob_matches(glob.as_bytes(), event_type.as_bytes()),
            None => glob.bytes().all(|byte| byte == b'*'),
        };
        self.0.is_empty() || self.0.iter().any(matches)
    }
}

impl TypeFilter {
    /// The globs as written.
    pub fn globs(&self) -> &[String] {
        &self.0
    }
}

impl TryFrom<Vec<String>> for TypeFilter {
    type Error = String;

    fn try_from(globs: Vec<String>) -> Result<Self, String> {
        Self::new(globs).map_err(|error| error.problem)
    }
}

impl From<TypeFilter> for Vec<String> {
    fn from(filter: TypeFilter) -> Self {
        filter.0
    }
}

/// On a mismatch only the last `*` takes one more character. Backtracking to an earlier `*` cannot help,
/// so the work is bounded by the product of both lengths.
fn glob_matches(glob: &[u8], text: &[u8]) -> bool {
    let (mut in_glob, mut in_text) = (0, 0);
    let mut last_star: Option<(usize, usize)> = None;
    while in_text < text.len() {
        match glob.get(in_glob) {
            Some(b'*') => {
                last_star = Some((in_glob, in_text));
                in_glob += 1;
            }
            Some(letter) if *letter == text[in_text] => {
                in_glob += 1;
                in_text += 1;
            }
            Some(_) | None => {
                let Some((star, taken)) = &mut last_star else { return false };
                *taken += 1;
                (in_glob, in_text) = (*star + 1, *taken);
            }
        }
    }
    glob[in_glob..].iter().all(|byte| *byte == b'*')
}
