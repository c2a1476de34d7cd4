//! Commands that list: the arguments for one page, and how a page is printed.

use serde_json::Value;

use super::admin_client::{Remote, Server, query};
use super::events::read;
use super::output::{self, CommandFailure, Exit};
use crate::api::List as Page;
use crate::format;

/// Filters of a list, as the query of its route takes them.
pub(super) type Filters = Vec<(&'static str, Option<String>)>;

/// Which page of a list.
#[derive(Debug, clap::Args)]
pub(super) struct PageArgs {
    /// The cursor that the previous page printed
    #[arg(long)]
    pub(super) cursor: Option<String>,
    /// The most items of one page
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=500))]
    pub(super) limit: u32,
}

impl PageArgs {
    /// The URL of the page: `route` with these filters.
    pub(super) fn path(&self, route: &str, mut filters: Filters) -> String {
        filters.push(("cursor", self.cursor.clone()));
        filters.push(("limit", Some(self.limit.to_string())));
        format!("/api/v1/{route}{}", query(filters))
    }
}

/// Arguments of every list.
#[derive(Debug, clap::Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl ListArgs {
    /// Reads one page of `route` and prints each item.
    pub(super) async fn print(
        self,
        route: &str,
        filters: Filters,
        words: Words,
        line: impl Fn(Value) -> Result<String, CommandFailure>,
    ) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let page = search(&server, self.page, route, filters).await?;
        print_page(page, self.json, words, line)
    }
}

/// The most pages that one command searches. A page takes about 50 ms.
const PAGES_MAX: usize = 100;

/// Reads the first page that holds an item. The server ends a page when its search takes long.
async fn search(
    server: &Server,
    mut args: PageArgs,
    route: &str,
    filters: Filters,
) -> Result<Page<Value>, CommandFailure> {
    let mut pages = 1;
    loop {
        let page: Page<Value> = read(server.get(&args.path(route, filters.clone())).await?)?;
        let is_short = page.items.is_empty() && page.searched_to.is_some();
        if !is_short || pages == PAGES_MAX {
            return Ok(page);
        }
        args.cursor = page.next;
        pages += 1;
    }
}

/// The words of one kind of list.
pub(super) struct Words {
    /// Several items: `events`.
    pub(super) items: &'static str,
    /// The text for an empty list.
    pub(super) empty: &'static str,
}

/// Prints each item of a page, and how to get the next page.
pub(super) fn print_page(
    page: Page<Value>,
    json: bool,
    words: Words,
    line: impl Fn(Value) -> Result<String, CommandFailure>,
) -> Result<Exit, CommandFailure> {
    if page.items.is_empty() && page.searched_to.is_none() {
        output::words(words.empty);
    }
    for item in page.items {
        print_item(item, json, &line)?;
    }
    match (page.next, page.searched_to) {
        (Some(next), Some(at)) => output::words(&format!(
            "searched back to {}; to search further back for {}: --cursor {next}",
            format::at(at),
            words.items
        )),
        (Some(next), None) => output::words(&format!("more {}: --cursor {next}", words.items)),
        (None, _) => {}
    }
    Ok(Exit::Done)
}

/// Prints an item as JSON, or as the line that `line` makes of it.
pub(super) fn print_item(
    item: Value,
    json: bool,
    line: impl Fn(Value) -> Result<String, CommandFailure>,
) -> Result<(), CommandFailure> {
    match json {
        true => output::json(&item)?,
        false => output::data(&output::shown(&line(item)?))?,
    }
    Ok(())
}
