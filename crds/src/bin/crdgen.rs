//! `crdgen [ROOT]`: writes `crds/yaml/` and the templates of the `lampyris-crds` chart.
#![forbid(unsafe_code)]

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("."), PathBuf::from);
    for (folder, keep) in [("crds/yaml", false), ("helm/lampyris-crds/templates", true)] {
        std::fs::create_dir_all(root.join(folder))?;
        for (name, yaml) in crds::generate::manifests(keep)? {
            std::fs::write(root.join(folder).join(name), yaml)?;
        }
    }
    Ok(())
}
