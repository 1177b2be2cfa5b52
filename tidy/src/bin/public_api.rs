//! Prints the public API of a crate, one item a line, from the JSON that rustdoc writes.
//! `scripts/api` keeps these lists in `docs/api`.

use std::env;
use std::error::Error;

/// The methods that a derive adds, beside the line of its `impl`.
const DERIVED: [&str; 6] =
    ["::clone(&self)", "::eq(&self,", "::fmt(&self,", "::hash<", "::cmp(&self,", "::partial_cmp("];

fn main() -> Result<(), Box<dyn Error>> {
    let json = env::args_os().nth(1).ok_or("give the file that rustdoc has written")?;
    // What every type has says nothing about this crate.
    let api = public_api::Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .build()
        .map_err(|error| {
            format!("the crate public-api does not read this rustdoc JSON: {error}")
        })?;
    for item in api.items().map(ToString::to_string) {
        if !DERIVED.iter().any(|method| item.contains(method)) {
            println!("{item}");
        }
    }
    Ok(())
}
