"""`paco-reward build-dataset`: generated images become labelled pairs that a judge is trained on (arXiv 2512.04784).

sources     prompts and their images, checked            sets        reference and candidates of one prompt
cutting     grids become sub-figures                     rankings    best-first orders, by people or by a model
pairs       rankings become Yes/No pairs                 editing     (source, edited, instruction) rows become pairs
duplicates  images that show the same                    split       train and test by theme; as many Yes as No
reasons     why the answer is Yes or No                  sharegpt    the files that LLaMA-Factory reads
chat        questions to a server                        journal     answers that survive a kill
report      numbers and a picture of samples             build       all of it in order
"""
