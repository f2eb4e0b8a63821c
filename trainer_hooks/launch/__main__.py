from trainer_hooks.launch.main import main

if __name__ == "__main__":
    raise SystemExit(main())
