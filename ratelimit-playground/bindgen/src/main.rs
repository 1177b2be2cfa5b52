//! Writes the JavaScript between the playground's page and its module: `bindgen MODULE FOLDER`.
//! The program `wasm-bindgen` does it by the same library, and has three times the dependencies.

use std::env;
use std::error::Error;

use wasm_bindgen_cli_support::Bindgen;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let [module, folder] = &arguments[..] else {
        return Err("name a module and a folder".into());
    };
    let mut bindgen = Bindgen::new();
    bindgen.input_path(module).out_name("playground");
    bindgen.no_modules(true)?.typescript(false).remove_name_section(true);
    Ok(bindgen.generate(folder)?)
}
